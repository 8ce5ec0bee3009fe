"""GLA, Hydra, RWKV-6 and RWKV-7 without torch: options and cost.

Sources: arXiv 2312.06635 (GLA), 2407.09941 (Hydra), 2404.05892 (RWKV-6) and 2503.14456 (RWKV-7).
"""

from dataclasses import dataclass

from backbones.mamba_spec import check_scan
from backbones.registry import BlockCost, Spec, check_choice, check_kernel, register
from backbones.rwkv_spec import MISSING
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


def gla_cost(size: Size, options: GLAOptions, index: int) -> BlockCost:
    """Count GLA's mixer, whose queries and keys have half the width, and SwiGLU."""
    d, rank = size.width, low_rank(size.width)
    mixer = 4 * d * d + d * rank + rank * (d // 2)
    hidden = hidden_for(d, mixer + d // 2 + 2 * d, 3)
    return BlockCost(
        params=mixer + d // 2 + 2 * d + 3 * d * hidden,
        linear=mixer + 3 * d * hidden,
        mixing=lambda n: n * matrix_scan(d) // 2,
        saved=23 * d + 5 * hidden,
    )


@dataclass(frozen=True)
class HydraOptions:
    """Options of the family `hydra`.

    Attributes:
        conv: `true` (taps by distance along the full path, absent tokens count as 0), `compact`
            (taps over the present tokens) or `none`.
        state: State channels N of each direction; None takes half of the size's, as there are two.
        chunk: Tokens of one SSD chunk.
        kernel: `auto`, `torch` or a kernel of `backbones.ops.ssd`.
    """

    conv: str = "true"
    state: int | None = None
    chunk: int = 64
    kernel: str = "auto"

    def __post_init__(self) -> None:
        check_choice(self, "conv", "true", "compact", "none")
        check_scan(self.state, self.chunk)
        check_kernel(self.kernel, "ssd")

    def states(self, size: Size) -> int:
        """Return N of each direction."""
        return self.state or max(8, size.state // 2)


def hydra_cost(size: Size, options: HydraOptions, index: int) -> BlockCost:
    """Count Hydra's two mixers of two directions."""
    d, inner, state = size.width, 2 * size.width, options.states(size)
    heads, mixed = inner // size.headdim, inner + 4 * state
    conv = int(options.conv != "none")
    linear = d * (inner + mixed) + 2 * d * heads + inner * heads + inner * d
    scan = 2 * (3 * inner * state + 2 * inner) + inner + conv * 8 * mixed
    return BlockCost(
        params=2 * (linear + 5 * heads + inner + conv * 8 * mixed),
        linear=2 * linear,
        mixing=lambda n: 2 * n * scan,
        saved=2 * (5 * d + 6 * inner + (3 + 3 * conv) * mixed),
    )


@dataclass(frozen=True)
class MatrixRWKVOptions:
    """Options of the families `rwkv6` and `rwkv7`.

    Attributes:
        missing: `self`, `zero` or `nearest`: what stands in for an absent neighbour.
        kernel: `auto`, `torch` or a kernel of `backbones.ops.matrix_state`.
    """

    missing: str = "self"
    kernel: str = "auto"

    def __post_init__(self) -> None:
        check_choice(self, "missing", *MISSING)
        check_kernel(self.kernel, "rwkv6")  # The same as for "rwkv7".


def rwkv6_cost(size: Size, options: MatrixRWKVOptions, index: int) -> BlockCost:
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


def rwkv7_cost(size: Size, options: MatrixRWKVOptions, index: int) -> BlockCost:
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


register(Spec("gla", GLAOptions, gla_cost, "backbones.more.matrix_blocks:GLABlock"))
register(Spec("hydra", HydraOptions, hydra_cost, "backbones.more.hydra:HydraBlock"))
register(Spec("rwkv6", MatrixRWKVOptions, rwkv6_cost, "backbones.more.matrix_blocks:RWKV6Block"))
register(Spec("rwkv7", MatrixRWKVOptions, rwkv7_cost, "backbones.more.matrix_blocks:RWKV7Block"))
