"""Hydra-style bidirectional Mamba-2 (Hwang et al., arXiv 2407.09941): a quasiseparable mixer.

Both directions share x and z; each has its own B, C and steps. Neither counts the token itself (the
matrix's diagonal), which gets a term of its own that depends on the token. The convolution looks
three tokens to either side. A block is two mixers, one along rows, one along columns.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.mamba import REVERSED, Conv, Direction, Mixer, TwoMixers
from backbones.more.more_spec import HydraOptions
from backbones.ops.conv import causal_conv
from backbones.ops.native import OPERATIONS
from backbones.ops.ssd import ssd_packed
from backbones.sizes import Size
from routing.layout import Layout

REACH = 3


class CentredConv(Conv):
    """Depthwise convolution of seven taps around each token of a path, then SiLU."""

    taps = 2 * REACH + 1

    def forward(self, x: Tensor, layout: Layout, path: str) -> Tensor:
        """Convolve tokens (B, T, C) that are in scan order."""
        by_distance = self.mode == "true" and not layout.is_full
        place = layout.positions(path) if by_distance else None
        turned = None if place is None else layout.full_length - 1 - place.flip(-1)
        # Two causal halves; the second one runs backwards and leaves the token itself to the first.
        before = self.weight[:, : REACH + 1]
        after = F.pad(self.weight[:, REACH + 1 :].flip(1), (0, 1))
        y = causal_conv(x, before.contiguous(), self.bias, place)
        return F.silu(y + causal_conv(x.flip(1), after, None, turned).flip(1))


class Hydra(Mixer):
    """Bidirectional mixer.

    z, x, B1, C1, B2, C2 = W u
    y = strict(SSD(x, B1, C1)) + strict(SSD(x, B2, C2) reversed) + (d + W_d x) x
    out = W_o (RMSNorm(y silu(z)))
    """

    def __init__(self, size: Size, path: str, options: HydraOptions) -> None:
        super().__init__()
        self.inner, self.headdim = 2 * size.width, size.headdim
        self.state = options.states(size)
        self.path, self.options = path, options
        heads, mixed = self.inner // self.headdim, self.inner + 4 * self.state
        self.in_proj = nn.Linear(size.width, self.inner + mixed, bias=False)
        self.conv = CentredConv(mixed, options.conv) if options.conv != "none" else None
        # No skip: the diagonal is shared, and depends on the token.
        self.directions = nn.ModuleList(Direction(size.width, heads, skip=False) for _ in range(2))
        self.diagonal = nn.Linear(self.inner, heads)
        self.scale = nn.Parameter(torch.ones(self.inner))
        self.out_proj = nn.Linear(self.inner, size.width, bias=False)

    def forward(self, u: Tensor, layout: Layout) -> Tensor:
        """Mix tokens (B, T, D) that are in the order of `path`, and return them in it."""
        z, mixed = self.in_proj(u).split([self.inner, self.inner + 4 * self.state], dim=-1)
        mixed = F.silu(mixed) if self.conv is None else self.conv(mixed, layout, self.path)
        x, first, second = mixed.split([self.inner, 2 * self.state, 2 * self.state], dim=-1)
        y = self._scan(u, x, first, self.directions[0])
        turned = self.path + REVERSED
        u, x_there, second = (layout.turn(v, self.path, turned) for v in (u, x, second))
        back = self._scan(u, x_there, second, self.directions[1])
        y = y + layout.turn(back, turned, self.path)
        own = self.diagonal(x)[..., None] * x.unflatten(-1, (-1, self.headdim))
        gated = OPERATIONS[y.device.type].gated_rms_norm(y + own.flatten(-2), z, self.scale)
        return self.out_proj(gated)

    def _scan(self, u: Tensor, x: Tensor, bc: Tensor, way: Direction) -> Tensor:
        dt = F.softplus(way.dt_proj(u).to(way.dt_bias.dtype) + way.dt_bias)
        heads, rates = x.unflatten(-1, (-1, self.headdim)), -torch.exp(way.log_a)
        packed, chunk, kernel = torch.cat((x, bc), -1), self.options.chunk, self.options.kernel
        y = ssd_packed(packed, dt, rates, None, chunk, kernel, width=self.headdim)
        # What the token wrote itself, dt <C, B> x, is on the diagonal, which has its own term.
        b, c = bc.unsqueeze(-2).chunk(2, dim=-1)
        itself = dt * (b * c).sum(-1)
        return (y - itself.to(y.dtype)[..., None] * heads).flatten(-2)

    def initialise(self) -> None:
        """Draw what mixers share; diagonal and norm start at 1."""
        super().initialise()
        nn.init.ones_(self.diagonal.bias)
        nn.init.ones_(self.scale)


class HydraBlock(TwoMixers):
    """Two bidirectional mixers: along rows, then along columns."""

    scans = ("zigzag:0", "zigzag:1")

    def __init__(
        self, size: Size, index: int, grid: tuple[int, int], options: HydraOptions
    ) -> None:
        super().__init__(index, "ssd", options)
        self.one, self.two = (Hydra(size, path, options) for path in self.scans)
        self.lookups = [(Layout.reorder, path + REVERSED) for path in self.scans]
        if options.conv == "true":
            self.lookups += [(Layout.positions, path) for path in self.scans]
