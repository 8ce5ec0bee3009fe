"""RWKV-7 (Goose, arXiv 2503.14456): options and cost of a block (no torch here)."""

from dataclasses import dataclass
from typing import Annotated

from backbones.options.family import BlockCost, Spec, kernel_words
from backbones.options.rwkv import Missing
from backbones.sizes import Size, hidden_for
from backbones.validation import Choices


@dataclass(frozen=True)
class RWKV7Options:
    """Options of the family `rwkv7`."""

    missing: Missing = "self"
    kernel: Annotated[
        str,
        Choices(kernel_words("rwkv7")),
        "auto: flash-linear-attention on a GPU where it is installed, chunked matmuls elsewhere.",
    ] = "auto"


def matrix_head(width: int) -> int:
    """Return the head size: 64, or less where that would leave fewer than two heads."""
    return next(size for size in (64, 32, 16, 8) if width % size == 0 and width >= 2 * size)


def low_rank(width: int) -> int:
    """Return the rank of `LowRank`: about a 16th of the width, at least 8."""
    return max(8, round(width / 128) * 8)


def block_cost(size: Size, index: int, grid: tuple[int, int], options: RWKV7Options) -> BlockCost:
    """Count the time mix and the channel mix."""
    width, rank = size.width, low_rank(size.width)
    # Low-rank layers: decay, rate, gate and, except in block 0, the blend with block 0's values.
    blend = 2 * width * rank if index else 0
    linear = 4 * width * width + 6 * width * rank + blend
    mixer = linear + (14 if blend else 13) * width
    mixer_params = 4 * width * width + 8 * width * rank + 14 * width
    hidden = hidden_for(width, mixer_params, 2, width * width)
    return BlockCost(
        params=mixer + width * width + 2 * width * hidden + 2 * width,
        linear=linear + width * width + 2 * width * hidden,
        mixing=lambda tokens: tokens * (6 * width * matrix_head(width) + 10 * width),
        saved=79 * width + 2 * hidden,
    )


FAMILY = Spec("rwkv7", RWKV7Options, block_cost, "backbones.rwkv7:RWKV7Block", carries=True)
