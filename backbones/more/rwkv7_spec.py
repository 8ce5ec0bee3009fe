"""RWKV-7 (arXiv 2503.14456) without torch: options and cost."""

from typing import ClassVar

from backbones.more.rwkv6_spec import MatrixRWKVOptions
from backbones.registry import BlockCost, Spec, register
from backbones.sizes import Size, hidden_for, low_rank, matrix_scan


class RWKV7Options(MatrixRWKVOptions):
    """Options of `rwkv7`: those of `rwkv6`, for another scan."""

    operation: ClassVar[str] = "rwkv7"


def block_cost(size: Size, options: MatrixRWKVOptions, index: int) -> BlockCost:
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
        mixing=lambda n: n * (2 * matrix_scan(d) + 10 * d),
        saved=79 * d + 2 * hidden,
    )


register(Spec("rwkv7", RWKV7Options, block_cost, "backbones.more.rwkv7:RWKV7Block"))
