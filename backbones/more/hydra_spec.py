"""Hydra (Hwang et al., arXiv 2407.09941) without torch: options and cost."""

from dataclasses import dataclass

from backbones.mamba_spec import check_scan
from backbones.registry import BlockCost, Spec, check_choice, check_kernel, register
from backbones.sizes import Size


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


def block_cost(size: Size, options: HydraOptions, index: int) -> BlockCost:
    """Count two mixers of two directions."""
    d, inner, state = size.width, 2 * size.width, options.states(size)
    heads, mixed = inner // size.headdim, inner + 4 * state
    conv = int(options.conv != "none")
    linear = d * (inner + mixed) + 2 * d * heads + inner * heads + inner * d
    scan = 2 * (3 * inner * state + 2 * inner) + inner + conv * 8 * mixed
    return BlockCost(
        params=2 * (linear + 5 * heads + inner + conv * 8 * mixed),
        linear=2 * linear,
        mixing=lambda n: 2 * n * scan,
        saved=2 * (5 * d + 8 * inner + (3 + 3 * conv) * mixed),
    )


register(Spec("hydra", HydraOptions, block_cost, "backbones.more.hydra:HydraBlock"))
