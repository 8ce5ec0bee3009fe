"""RWKV-6 (arXiv 2404.05892) without torch: options and cost."""

from dataclasses import dataclass
from typing import ClassVar

from backbones.registry import BlockCost, Spec, check_choice, check_kernel, register
from backbones.rwkv_spec import MISSING
from backbones.sizes import Size, hidden_for, low_rank, matrix_scan


@dataclass(frozen=True)
class MatrixRWKVOptions:
    """Options of `rwkv6`, and the base of `rwkv7`'s.

    Attributes:
        operation: What the scan is called by `ops.dispatch` (no option).
        missing: `self`, `zero` or `nearest`: what stands in for an absent neighbour.
        kernel: `auto`, `torch` or a kernel of `backbones.ops.matrix_state`.
    """

    operation: ClassVar[str] = "rwkv6"

    missing: str = "self"
    kernel: str = "auto"

    def __post_init__(self) -> None:
        check_choice(self, "missing", *MISSING)
        check_kernel(self.kernel, self.operation)


def block_cost(size: Size, options: MatrixRWKVOptions, index: int) -> BlockCost:
    """Count the time mix and the channel mix."""
    d, rank = size.width, low_rank(size.width)
    linear = 5 * d * d + 10 * d * (rank // 2) + 2 * d * rank
    mixer = linear + 10 * d
    hidden = hidden_for(d, mixer, 2, d * d)
    return BlockCost(
        params=mixer + d * d + 2 * d * hidden + 2 * d,
        linear=linear + d * d + 2 * d * hidden,
        mixing=lambda n: n * (matrix_scan(d) + 2 * d + 13 * d),
        saved=51 * d + 2 * hidden,
    )


register(Spec("rwkv6", MatrixRWKVOptions, block_cost, "backbones.more.rwkv6:RWKV6Block"))
