"""RWKV-7 (arXiv 2503.14456) without torch: options and cost."""

from dataclasses import dataclass

from backbones.registry import BlockCost, Spec, check_choice, check_kernel, register
from backbones.rwkv_spec import MISSING
from backbones.sizes import Size, hidden_for


@dataclass(frozen=True)
class RWKV7Options:
    """Options of the family `rwkv7`.

    Attributes:
        missing: `self`, `zero` or `nearest`: what stands in for an absent neighbour.
        kernel: `auto`, `torch` or a kernel of `backbones.ops.matrix_state`.
    """

    missing: str = "self"
    kernel: str = "auto"

    def __post_init__(self) -> None:
        check_choice(self, "missing", *MISSING)
        check_kernel(self.kernel, "rwkv7")


def matrix_head(width: int) -> int:
    """Return the channels of a head with a matrix state: 64 where that leaves two heads."""
    return next(size for size in (64, 32, 16, 8) if width % size == 0 and width >= 2 * size)


def low_rank(width: int) -> int:
    """Return the rank of a small token-dependent correction: a 16th of the width, 8 at least."""
    return max(8, round(width / 128) * 8)


def block_cost(size: Size, options: RWKV7Options, index: int) -> BlockCost:
    """Count the time mix and the channel mix."""
    d, rank = size.width, low_rank(size.width)
    # Decay, rate, gate, and the blend with block 0's values (which block 0 has not), each of low
    # rank.
    blend = 2 * d * rank if index else 0
    linear = 4 * d * d + 6 * d * rank + blend
    mixer = linear + (13 + bool(blend)) * d
    hidden = hidden_for(d, 4 * d * d + 8 * d * rank + 14 * d, 2, d * d)
    return BlockCost(
        params=mixer + d * d + 2 * d * hidden + 2 * d,
        linear=linear + d * d + 2 * d * hidden,
        mixing=lambda n: n * (6 * d * matrix_head(d) + 10 * d),
        saved=79 * d + 2 * hidden,
    )


register(Spec("rwkv7", RWKV7Options, block_cost, "backbones.rwkv7:RWKV7Block"))
