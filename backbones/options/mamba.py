"""Mamba-2 (arXiv 2405.21060) and Mamba-1 (arXiv 2312.00752): options and cost (no torch here)."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, MultipleOf

from backbones.options.family import BlockCost, Spec, from_yaml, kernel_words
from backbones.sizes import BackboneError, Size
from backbones.validation import Choices
from routing.options import OMITTED_AT_DEFAULT


@dataclass(frozen=True)
class MambaOptions:
    """Options of the family `mamba`."""

    scan: Annotated[
        Literal["alternate", "zigzag", "bidirectional", "raster"],
        "alternate: one snake path forward, then reversed; zigzag: the next two of eight snake "
        "paths; bidirectional: both directions summed in each mixer; raster: the same along the "
        "rows, as Vim and DiS.",
    ] = "alternate"
    conv: Annotated[
        Literal["true", "compact", "none"],
        from_yaml(true="true", false="none"),
        "true: taps by distance along the full path, absent tokens count as 0; compact: taps over "
        "the present tokens; none: no convolution.",
    ] = "true"
    gap: Annotated[
        Literal["off", "decay", "dt"],
        from_yaml(false="off"),
        "Absent tokens: off: nothing; decay: the state decays over them; dt: the step is as long "
        "as the gap, over at most 4 steps.",
    ] = "off"
    mixer: Annotated[
        Literal["mamba2", "mamba1"],
        "mamba2: chunked matmuls, several times faster on a CPU than mamba1's selective scan.",
    ] = "mamba2"
    mixers: Annotated[
        Literal[1, 2],
        OMITTED_AT_DEFAULT,
        "Mixers in a block: 2 make a block of DiT's size; 1 is ZigMa's and DiS's, half of it.",
    ] = 2
    state: Annotated[
        Annotated[int, Ge(8), MultipleOf(8)] | None,  # Kernels need the multiple.
        "State channels N; null: mamba2 64 from width 384 on, less below, for about a DiT block's "
        "parameters; mamba1 16.",
    ] = None
    chunk: Annotated[
        int,
        Ge(1),
        "Tokens of one SSD chunk; larger ones cost more memory for no speed. mamba-ssm's kernel "
        "takes at least twice the state.",
    ] = 64
    kernel: Annotated[
        str,
        Choices(kernel_words("ssd", "selective_scan")),
        "auto: the fastest available; naming one that is not available is an error.",
    ] = "auto"

    @property
    def operation(self) -> str:
        """The scan operation in `backbones.ops`."""
        return "ssd" if self.mixer == "mamba2" else "selective_scan"

    @property
    def directions(self) -> int:
        """Scan directions in each mixer."""
        return 2 if self.scan in ("bidirectional", "raster") else 1

    def check_consistency(self) -> None:
        """Raise `BackboneError` if the mixer has no such kernel."""
        kernels = kernel_words(self.operation)
        if self.kernel not in kernels:
            raise BackboneError(
                f"kernel={self.kernel}: expected one of "
                f"{', '.join(kernels)} with mixer={self.mixer}"
            )


def step_rank(width: int) -> int:
    """Return the rank of Mamba-1's dt projection: D / 16, rounded up to a multiple of 8."""
    return max(8, math.ceil(width / 16 / 8) * 8)


def block_cost(size: Size, index: int, grid: tuple[int, int], options: MambaOptions) -> BlockCost:
    """Count the block's mixers."""
    count = _mamba2_cost if options.mixer == "mamba2" else _mamba1_cost
    params, linear, scan, saved = count(size, options)
    n = options.mixers
    return BlockCost(n * params, n * linear, lambda tokens: n * tokens * scan, n * saved)


def _mamba2_cost(size: Size, options: MambaOptions) -> tuple[int, int, int, int]:
    width, inner, state = size.width, 2 * size.width, options.state or size.state
    conv, directions = int(options.conv != "none"), options.directions
    heads, mixed = inner // size.headdim, inner + 2 * state
    linear = width * (inner + mixed) + directions * width * heads + inner * width
    params = linear + directions * 3 * heads + conv * 5 * mixed + inner
    # Per state entry: two products for h = a h + (dt x) B, one for y = C h; per channel: dt x and
    # skip x.
    scan = directions * (3 * inner * state + 2 * inner + conv * 4 * mixed)
    saved = 5 * width + 3 * inner + mixed + conv * 2 * mixed
    return params, linear, scan, saved + (directions - 1) * (width + 4 * inner + 3 * mixed)


def _mamba1_cost(size: Size, options: MambaOptions) -> tuple[int, int, int, int]:
    width, inner, state = size.width, 2 * size.width, options.state or 16
    conv, directions, rank = int(options.conv != "none"), options.directions, step_rank(size.width)
    linear = 3 * width * inner + directions * (inner * (rank + 2 * state) + rank * inner)
    params = linear + directions * (2 * inner + inner * state) + conv * 5 * inner
    scan = directions * (3 * inner * state + 2 * inner + conv * 4 * inner)
    saved = 5 * width + 4 * inner + directions * (7 * inner + 2 * rank + 4 * state)
    return params, linear, scan, saved


FAMILY = Spec(
    "mamba",
    MambaOptions,
    block_cost,
    "backbones.mamba:MambaBlock",
    branches=lambda options: options.mixers,
)
