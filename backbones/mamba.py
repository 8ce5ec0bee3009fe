"""Mamba-2 (Dao and Gu, arXiv 2405.21060): a block is two mixers in a row on two scan paths.

A mixer has about 6 D^2 parameters and a DiT block's two branches 12 D^2, so two mixers make one
block: route indices count blocks, never mixers (one makes a block in ZigMa and DiS: `mixers=1`).
The residual stream stays in raster order; a mixer gets its input (B, T, D) along its scan path
(`MambaBlock.paths`; in a route, the dense path with the absent tokens deleted), and its output is
put back into raster order.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers import Block
from backbones.ops.mixer import MixerOperations, mixer_operations
from backbones.ops.native import OPERATIONS
from backbones.ops.selective_scan import selective_scan
from backbones.options.mamba import MambaOptions, step_rank
from backbones.sizes import Size
from routing.grid import REVERSED
from routing.layout import Layout

MAX_GAP = 4.0  # Without it, the gap of a whole row would make the input weight explode.


def paths(scan: str, index: int, mixers: int = 2) -> tuple[str, ...]:
    """Return the scan paths of block `index`'s mixers; their rotation continues over the stack."""
    if scan == "raster":
        return ("raster",) * mixers
    names = []
    for mixer in range(mixers * index, mixers * (index + 1)):
        if scan == "zigzag":
            names.append(f"zigzag:{mixer % 8}")
        else:
            turned = scan == "alternate" and mixer % 2 == 1
            names.append("zigzag:0" + (REVERSED if turned else ""))
    return tuple(names)


def look_up(layout: Layout, kind: str, path: str) -> Any:
    """Return a table of the layout along a path: its scan order, positions or gaps.

    The stack has computed it (`Layout.prepare`), unless a block is called on its own.
    """
    if (kind, path) in layout.tables:
        return layout.tables[kind, path]
    compute = {"scan": layout.scan_order, "positions": layout.positions, "gaps": layout.gaps}
    return compute[kind](path)


class Conv(nn.Module):
    """Depthwise causal convolution of four taps along the scan path, then SiLU."""

    taps = 4

    def __init__(self, channels: int, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.weight = nn.Parameter(torch.empty(channels, self.taps))
        self.bias = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor, layout: Layout, path: str, ops: MixerOperations) -> Tensor:
        """Convolve tokens (B, T, C) that are in scan order."""
        by_distance = self.mode == "true" and not layout.is_full
        position = look_up(layout, "positions", path) if by_distance else None
        return ops.conv(x, self.weight, self.bias, position, True)

    def initialise(self) -> None:
        """Initialise taps and bias as torch's convolutions do."""
        bound = self.taps**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)


def _steps(
    raw: Tensor, bias: Tensor, gap: str, layout: Layout, path: str
) -> tuple[Tensor, Tensor | None]:
    """Return steps dt > 0 (B, T, *) and gaps for the decay, both in float32 or wider."""
    dt = F.softplus(raw.to(bias.dtype) + bias)
    if gap == "off" or layout.is_full:
        return dt, None
    gaps = look_up(layout, "gaps", path).to(dt.dtype).clamp(max=MAX_GAP)
    if gap == "decay":
        return dt, gaps
    return dt * gaps[..., None], None


def _draw_dt_bias(bias: Tensor) -> None:
    """Fill with the inverse softplus of steps drawn log-uniformly from [1e-3, 1e-1]."""
    low, high = 1e-3, 1e-1
    dt = torch.exp(torch.rand_like(bias) * math.log(high / low) + math.log(low))
    bias.copy_(dt + torch.log(-torch.expm1(-dt)))


class Direction(nn.Module):
    """Per-head step and decay of one scan direction (Mamba-2).

    Its `log_a` is mamba-ssm's A_log, `skip` its D.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        # Not part of in_proj, whose width would no longer be a multiple of 8 at every size.
        self.dt_proj = nn.Linear(width, heads, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.log_a = nn.Parameter(torch.empty(heads))
        self.skip = nn.Parameter(torch.ones(heads))

    def initialise(self) -> None:
        """Initialise as Mamba-2: A in 1..16, steps in 1e-3..1e-1, hardly moved by the input."""
        self.dt_proj.reset_parameters()  # As mamba-ssm: Xavier would be 2.4 times as wide.
        _draw_dt_bias(self.dt_bias)
        self.log_a.copy_(torch.empty_like(self.log_a).uniform_(1, 16).log())
        self.skip.fill_(1.0)


class Mixer(nn.Module):
    """Base of both mixers: an optional convolution, and one or two directions along a path."""

    path: str
    conv: Conv | None
    directions: Any

    def scan(
        self, ops: MixerOperations, layout: Layout, path: str, direction: Any, *inputs: Tensor
    ) -> Tensor:
        """Scan inputs (B, T, *) that are in the order of `path`."""
        raise NotImplementedError

    def scan_directions(self, ops: MixerOperations, layout: Layout, *inputs: Tensor) -> Tensor:
        """Scan inputs (B, T, *) that are in the order of `self.path`, and sum over directions."""
        y = self.scan(ops, layout, self.path, self.directions[0], *inputs)
        if len(self.directions) == 2:
            backwards = self.path + REVERSED
            turned = [layout.between_scans(x, self.path, backwards) for x in inputs]
            back = self.scan(ops, layout, backwards, self.directions[1], *turned)
            y = y + layout.between_scans(back, backwards, self.path)
        return y

    def initialise(self) -> None:
        """Initialise steps, decays and the convolution."""
        if self.conv is not None:
            self.conv.initialise()
        for direction in self.directions:
            direction.initialise()


class Mamba2(Mixer):
    """Mamba-2 mixer: state-space duality with scalar decay per head.

    z, x, B, C = W x;  h_t = exp(dt A) h_{t-1} + dt B_t x_t;  y_t = C_t h_t + skip x_t
    out = W_o (RMSNorm(y silu(z)))
    """

    def __init__(self, size: Size, path: str, options: MambaOptions) -> None:
        super().__init__()
        self.inner, self.headdim = 2 * size.width, size.headdim
        self.state = options.state or size.state
        self.path, self.options = path, options
        heads = self.inner // self.headdim
        channels = self.inner + 2 * self.state
        self.in_proj = nn.Linear(size.width, self.inner + channels, bias=False)
        self.conv = Conv(channels, options.conv) if options.conv != "none" else None
        self.directions = nn.ModuleList(
            Direction(size.width, heads) for _ in range(options.directions)
        )
        self.scale = nn.Parameter(torch.ones(self.inner))
        self.out_proj = nn.Linear(self.inner, size.width, bias=False)

    def forward(self, u: Tensor, layout: Layout, ops: MixerOperations) -> Tensor:
        """Mix tokens (B, T, D) that are in the order of `path`, and return them in it."""
        # Two products instead of one that is split: the gradients need no concatenation.
        into_z, into_xbc = self.in_proj.weight.split([self.inner, self.inner + 2 * self.state])
        z, xbc = F.linear(u, into_z), F.linear(u, into_xbc)
        y = self.scan_directions(ops, layout, u, xbc)
        norm = OPERATIONS[u.device.type].gated_rms_norm
        return self.out_proj(norm(y, z, self.scale))

    def scan(
        self, ops: MixerOperations, layout: Layout, path: str, direction: Direction, *inputs: Tensor
    ) -> Tensor:
        """Convolve and scan; the inputs are tokens u (B, T, D) and x, B and C side by side."""
        u, xbc = inputs
        gap, a = self.options.gap, -torch.exp(direction.log_a)
        dt, decay_gap = _steps(direction.dt_proj(u), direction.dt_bias, gap, layout, path)
        xbc = F.silu(xbc) if self.conv is None else self.conv(xbc, layout, path, ops)
        # Heads and states are multiples of 8 at every size, as the native operator wants.
        return ops.ssd(xbc, dt, a, direction.skip, decay_gap, self.headdim).flatten(-2)

    def initialise(self) -> None:
        """Initialise the shared parts; the norm's weights start at 1."""
        super().initialise()
        nn.init.ones_(self.scale)


class SelectiveDirection(nn.Module):
    """Input-dependent step, B and C of one scan direction (Mamba-1)."""

    def __init__(self, inner: int, rank: int, state: int) -> None:
        super().__init__()
        self.project = nn.Linear(inner, rank + 2 * state, bias=False)
        self.dt_proj = nn.Linear(rank, inner, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(inner))
        self.log_a = nn.Parameter(torch.empty(inner, state))
        self.skip = nn.Parameter(torch.ones(inner))

    def initialise(self) -> None:
        """Initialise as Mamba: A = 1..N (S4D-real), steps in 1e-3..1e-1."""
        _draw_dt_bias(self.dt_bias)
        bound = self.dt_proj.in_features**-0.5
        nn.init.uniform_(self.dt_proj.weight, -bound, bound)
        states = torch.arange(1, self.log_a.shape[1] + 1, dtype=self.log_a.dtype)
        self.log_a.copy_(states.log().expand_as(self.log_a))
        self.skip.fill_(1.0)


class Mamba1(Mixer):
    """Mamba mixer (arXiv 2312.00752): a selective scan with a decay per channel and state."""

    def __init__(self, size: Size, path: str, options: MambaOptions) -> None:
        super().__init__()
        self.inner, self.state = 2 * size.width, options.state or 16
        self.rank = step_rank(size.width)
        self.path, self.options = path, options
        self.in_proj = nn.Linear(size.width, 2 * self.inner, bias=False)
        self.conv = Conv(self.inner, options.conv) if options.conv != "none" else None
        self.directions = nn.ModuleList(
            SelectiveDirection(self.inner, self.rank, self.state) for _ in range(options.directions)
        )
        self.out_proj = nn.Linear(self.inner, size.width, bias=False)

    def forward(self, u: Tensor, layout: Layout, ops: MixerOperations) -> Tensor:
        """Mix tokens (B, T, D) that are in the order of `path`, and return them in it."""
        x, z = self.in_proj(u).chunk(2, dim=-1)
        y = self.scan_directions(ops, layout, x)
        return self.out_proj(y.to(z.dtype) * F.silu(z))

    def scan(
        self,
        ops: MixerOperations,
        layout: Layout,
        path: str,
        direction: SelectiveDirection,
        *inputs: Tensor,
    ) -> Tensor:
        """Convolve and scan; the input is x (B, T, 2 D)."""
        (x,) = inputs
        x = F.silu(x) if self.conv is None else self.conv(x, layout, path, ops)
        low, b, c = direction.project(x).split([self.rank, self.state, self.state], dim=-1)
        kernel, gap = self.options.kernel, self.options.gap
        dt, decay_gap = _steps(direction.dt_proj(low), direction.dt_bias, gap, layout, path)
        a = -torch.exp(direction.log_a)
        return selective_scan(x, dt, a, b, c, direction.skip, kernel, decay_gap)


class MambaBlock(Block):
    """One or two mixers of Mamba-2 or Mamba-1, each under its own part of the modulation."""

    def __init__(
        self, size: Size, index: int, grid: tuple[int, int], options: MambaOptions
    ) -> None:
        super().__init__(index)
        mixer = Mamba2 if options.mixer == "mamba2" else Mamba1
        self.paths = paths(options.scan, index, options.mixers)
        self.one = mixer(size, self.paths[0], options)
        self.two = mixer(size, self.paths[1], options) if options.mixers == 2 else None
        self.kernel, self.chunk = options.kernel, options.chunk
        self.kernels = [(options.operation, options.kernel)]
        if options.conv != "none":
            self.kernels.append(("conv", "auto"))
        self.scans = self.paths
        if options.directions == 2:
            self.scans += tuple(path + REVERSED for path in self.paths)
        for scan in self.scans:
            if options.conv == "true":
                self.tables.append(("positions", scan))
            if options.gap != "off":
                self.tables.append(("gaps", scan))

    def forward(self, x: Tensor, cond: Tensor, layout: Layout) -> Tensor:
        """Run the block on tokens (B, T, D) under its modulation (B, 3 or 6, 1, D).

        adaLN puts the tokens into the mixer's scan order, and the gated sum puts them back.
        """
        ops = OPERATIONS[x.device.type]
        mixer_ops = mixer_operations(x, self.kernel, self.chunk)
        modulation = cond.unbind(1)
        mixers = [self.one] if self.two is None else [self.one, self.two]
        for n, mixer in enumerate(mixers):
            shift, scale, gate = modulation[3 * n : 3 * n + 3]
            order = look_up(layout, "scan", self.paths[n])
            y = mixer(ops.adaln(x, shift, scale, order), layout, mixer_ops)
            x = ops.gated_sum(x, gate, y, order)
        return x

    def initialise(self) -> None:
        """Initialise the weights."""
        super().initialise()
        self.one.initialise()
        if self.two is not None:
            self.two.initialise()
