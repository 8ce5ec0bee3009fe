"""Gated linear attention (arXiv 2312.06635) without torch: options and cost."""

from dataclasses import dataclass

from backbones.registry import BlockCost, Spec, check_kernel, register
from backbones.sizes import Size, hidden_for, low_rank, matrix_scan


@dataclass(frozen=True)
class GLAOptions:
    """Options of the family `gla`.

    Attributes:
        kernel: `auto`, `torch` or a kernel of `backbones.ops.matrix_state`.
    """

    kernel: str = "auto"

    def __post_init__(self) -> None:
        check_kernel(self.kernel, "gla")


def block_cost(size: Size, options: GLAOptions, index: int) -> BlockCost:
    """Count the mixer, whose queries and keys have half the width, and SwiGLU."""
    d, rank = size.width, low_rank(size.width)
    mixer = 4 * d * d + d * rank + rank * (d // 2)
    hidden = hidden_for(d, mixer + d // 2 + 2 * d, 3)
    return BlockCost(
        params=mixer + d // 2 + 2 * d + 3 * d * hidden,
        linear=mixer + 3 * d * hidden,
        mixing=lambda n: n * matrix_scan(d) // 2,
        saved=23 * d + 5 * hidden,
    )


register(Spec("gla", GLAOptions, block_cost, "backbones.more.gla:GLABlock"))
