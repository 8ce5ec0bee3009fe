"""DiT (Peebles and Xie, arXiv 2212.09748): options and cost of a block (no torch here)."""

from dataclasses import dataclass
from typing import Annotated

from backbones.options.family import BlockCost, Spec
from backbones.sizes import BackboneError, Size


@dataclass(frozen=True)
class DiTOptions:
    """Options of the family `dit`."""

    rope: Annotated[
        bool, "2-D rotary positions beside the fixed sin-cos ones; a route gathers their rows."
    ] = False
    qk_norm: Annotated[
        bool, "RMSNorm of queries and keys: steadier at high learning rates and in bf16."
    ] = False


def check_rope(size: Size, grid: tuple[int, int], options: DiTOptions) -> None:
    """Raise `BackboneError` if rotary positions do not fit the head size."""
    head_width = size.width // size.heads
    if options.rope and head_width % 4:
        raise BackboneError(
            f"rope=true needs a head size that is a multiple of 4, but width {size.width} over "
            f"{size.heads} heads gives {head_width}; try another heads="
        )


def attention_extras(size: Size, options: DiTOptions) -> tuple[int, int]:
    """Return parameters and saved floats (per token) of QK-norm and rotary positions."""
    norms = 2 * (size.width // size.heads) if options.qk_norm else 0
    return norms, ((3 if options.rope else 0) + (5 if norms else 0)) * size.width


def block_cost(size: Size, index: int, grid: tuple[int, int], options: DiTOptions) -> BlockCost:
    """Count attention (4 D^2) and an MLP of ratio 4 (8 D^2)."""
    width = size.width
    norms, saved = attention_extras(size, options)
    return BlockCost(
        params=12 * width * width + 9 * width + norms,
        linear=12 * width * width,
        mixing=lambda tokens: 2 * tokens * tokens * width,
        saved=18 * width + saved,
    )


FAMILY = Spec("dit", DiTOptions, block_cost, "backbones.dit:DiTBlock", check_rope)
