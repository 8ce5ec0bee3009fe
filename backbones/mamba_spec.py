"""Mamba-2 (arXiv 2405.21060) and Mamba-1 (arXiv 2312.00752) without torch: options and cost."""

import math
from dataclasses import dataclass

from backbones.registry import BlockCost, Spec, check_choice, check_kernel, register
from backbones.sizes import Size, check_whole


@dataclass(frozen=True)
class MambaOptions:
    """Options of the family `mamba`.

    Attributes:
        scan: `alternate` (one snake path forward, then reversed), `zigzag` (the next two of eight
            snake paths) or `bidirectional` (both directions summed inside each mixer).
        conv: `true` (taps by distance along the full path, absent tokens count as 0), `compact`
            (taps over the present tokens) or `none`.
        gap: What the scan does about absent tokens: `off` (nothing), `decay` (the state decays over
            them) or `dt` (the step is as long as the gap), over at most 4 steps.
        mixer: `mamba2` or `mamba1`.
        state: State channels N; None takes the size's for Mamba-2 and 16 for Mamba-1.
        chunk: Tokens of one SSD chunk.
        kernel: `auto`, `torch` or a kernel of `backbones.ops.ssd` (`ops.selective_scan` for
            Mamba-1).
    """

    scan: str = "alternate"
    conv: str = "true"
    gap: str = "off"
    mixer: str = "mamba2"
    state: int | None = None
    chunk: int = 64
    kernel: str = "auto"

    def __post_init__(self) -> None:
        check_choice(self, "scan", "alternate", "zigzag", "bidirectional")
        check_choice(self, "conv", "true", "compact", "none")
        check_choice(self, "gap", "off", "decay", "dt")
        check_choice(self, "mixer", "mamba2", "mamba1")
        check_scan(self.state, self.chunk)
        check_kernel(self.kernel, "ssd" if self.mixer == "mamba2" else "selective_scan")

    @property
    def ways(self) -> int:
        """Scan directions in each mixer."""
        return 2 if self.scan == "bidirectional" else 1


def check_scan(state: int | None, chunk: int) -> None:
    """Raise `BackboneError` for state channels or a length of chunks that scans do not take."""
    check_whole(chunk=chunk)
    if state is not None:
        check_whole(8, step=8, state=state)  # Kernels need the multiple.


def step_rank(width: int) -> int:
    """Return the rank of Mamba-1's projection to the steps: D / 16, in steps of 8."""
    return max(8, math.ceil(width / 16 / 8) * 8)


def block_cost(size: Size, options: MambaOptions, index: int) -> BlockCost:
    """Count two mixers."""
    count = _mamba2 if options.mixer == "mamba2" else _mamba1
    params, linear, scan, saved = count(size, options, options.ways, int(options.conv != "none"))
    return BlockCost(2 * params, 2 * linear, lambda n: 2 * n * scan, 2 * saved)


def _mamba2(size: Size, options: MambaOptions, ways: int, conv: int) -> tuple[int, int, int, int]:
    d, inner, state = size.width, 2 * size.width, options.state or size.state
    heads, mixed = inner // size.headdim, inner + 2 * state
    linear = d * (inner + mixed) + ways * d * heads + inner * d
    params = linear + ways * 3 * heads + conv * 5 * mixed + inner
    # h = a h + (dt x) B is two products a state entry, y = C h a third; dt x and skip x one each a
    # channel.
    scan = ways * (3 * inner * state + 2 * inner + conv * 4 * mixed)
    saved = 5 * d + 3 * inner + mixed + conv * 2 * mixed
    return params, linear, scan, saved + (ways - 1) * (d + 4 * inner + 3 * mixed)


def _mamba1(size: Size, options: MambaOptions, ways: int, conv: int) -> tuple[int, int, int, int]:
    d, inner, state, rank = size.width, 2 * size.width, options.state or 16, step_rank(size.width)
    linear = 3 * d * inner + ways * (inner * (rank + 2 * state) + rank * inner)
    params = linear + ways * (2 * inner + inner * state) + conv * 5 * inner
    scan = ways * (3 * inner * state + 2 * inner + conv * 4 * inner)
    saved = 5 * d + 4 * inner + ways * (7 * inner + 2 * rank + 4 * state)
    return params, linear, scan, saved


register(Spec("mamba", MambaOptions, block_cost, "backbones.mamba:MambaBlock"))
