"""RWKV-7 (Goose, arXiv 2503.14456) for images: a matrix state with a delta-rule update.

Each block scans one path, the next block another one: forward and reversed, along rows and
along columns, in rotation (`layers.rotating_path`). The token shift is the two-dimensional one of
`backbones.rwkv`, by the layout's table of neighbours.

The values of the first block travel with the tokens as `v_first`: later blocks mix them in, so a
route gathers and scatters them like the residual stream (`carries`).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers import Block, rotating_path
from backbones.ops.matrix_state import rwkv7
from backbones.ops.native import OPERATIONS
from backbones.options.rwkv7 import RWKV7Options, low_rank, matrix_head
from backbones.rwkv import ChannelMix, Shift
from backbones.sizes import Size, hidden_for
from routing.layout import Layout

SLOWEST = math.exp(-0.5)  # Log decays lie in (-e^-0.5, 0): a step keeps at least 54 % of the state.


def decay_speed(width: int, index: int, depth: int) -> Tensor:
    """Return RWKV's initial decay (D,): -6 to -1 over the channels, steeper in deep blocks."""
    ramp = torch.arange(width, dtype=torch.float32) / max(width - 1, 1)
    return -6 + 5 * ramp ** (0.7 + 1.3 * index / max(depth - 1, 1))


class LowRank(nn.Module):
    """A token-dependent vector through a low-rank bottleneck: bias + B f(A x)."""

    def __init__(self, width: int, bias: bool = True) -> None:
        super().__init__()
        self.down = nn.Linear(width, low_rank(width), bias=False)
        self.up = nn.Linear(low_rank(width), width, bias=bias)

    def forward(self, x: Tensor, squash: bool = False) -> Tensor:
        """Map tokens (B, T, D)."""
        low = self.down(x)
        return self.up(torch.tanh(low) if squash else low)


def head_norm(y: Tensor, norm: nn.GroupNorm) -> Tensor:
    """Normalise heads (B, T, H, V) one by one with a GroupNorm of H groups; return (B, T, H V)."""
    flat = y.flatten(0, 1).flatten(1)
    weight, bias = norm.weight.to(flat.dtype), norm.bias.to(flat.dtype)
    return F.group_norm(flat, norm.num_groups, weight, bias, norm.eps).view(*y.shape[:2], -1)


class TimeMix7(nn.Module):
    """Token mixer of RWKV-7.

    With kk the unit-length key, a rate alpha in 0..1 and a log decay g, the state does
    S <- diag(e^g) S - kk alpha (kk^T S) + k v^T: it erases what is stored under kk.
    """

    def __init__(self, width: int, index: int, options: RWKV7Options) -> None:
        super().__init__()
        self.path, self.kernel = rotating_path(index), options.kernel
        self.heads = width // matrix_head(width)
        self.shift = Shift(width, 6, options.missing)
        self.receptance = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.decay, self.rate = LowRank(width), LowRank(width)
        self.blend = LowRank(width) if index else None
        # Counted as if block 0 had a `blend`, so that every block gets the same hidden width.
        self.missing_params = 0 if index else 2 * width * low_rank(width) + width
        self.gate = LowRank(width, bias=False)
        self.key_unit = nn.Parameter(torch.ones(width))
        self.key_rate = nn.Parameter(torch.ones(width))
        self.bonus = nn.Parameter(torch.zeros(self.heads, width // self.heads))
        self.norm = nn.GroupNorm(self.heads, width, eps=64e-5)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, layout: Layout, state: dict[str, Tensor]) -> Tensor:
        """Mix tokens (B, T, D); write or read the values of block 0 in `state`."""
        inputs = self.shift(x, layout)
        v = self.value(inputs[2])
        first = state.setdefault("v_first", v)
        if self.blend is not None:
            v = v + (first.to(v.dtype) - v) * torch.sigmoid(self.blend(inputs[2]))
        r, k = self.receptance(inputs[0]), self.key(inputs[1])
        rate = torch.sigmoid(self.rate(inputs[4]))
        logits = self.decay(inputs[3], squash=True)
        wide = torch.promote_types(logits.dtype, torch.float32)
        g = -SLOWEST * torch.sigmoid(logits.to(wide))
        unit = (k * self.key_unit).unflatten(-1, (self.heads, -1)).to(wide)
        unit = F.normalize(unit, dim=-1, eps=1e-6)
        k = k * (1 + (rate - 1) * self.key_rate)
        r, k, v, g, rate = (z.unflatten(-1, (self.heads, -1)) for z in (r, k, v, g, rate))
        bonus = (r * k * self.bonus).sum(-1, keepdim=True) * v
        r, g, k, v, a, b = (self._scan(z, layout) for z in (r, g, k, v, -unit, unit * rate))
        y = rwkv7(r, g, k, v, a, b, kernel=self.kernel)
        y = layout.from_scan(head_norm(y, self.norm), self.path)
        gate = self.gate(torch.sigmoid(inputs[5]))
        return self.output((y + bonus.flatten(-2)) * gate)

    def _scan(self, z: Tensor, layout: Layout) -> Tensor:
        return layout.to_scan(z.flatten(-2), self.path).unflatten(-1, (self.heads, -1))

    def initialise(self, index: int, depth: int) -> None:
        """Initialise decays, rates and mixtures."""
        width = self.key_unit.numel()
        ramp = (torch.arange(width) / width).pow(1 - index / depth)
        self.shift.mix.copy_(ramp.expand(6, -1))
        for part in (self.decay, self.rate, self.blend):
            if part is not None:
                part.up.weight.mul_(0.1)
        self.decay.up.bias.copy_(decay_speed(width, index, depth) + 0.5)
        self.key_unit.fill_(0.85)
        self.key_rate.fill_(1.0)
        nn.init.uniform_(self.bonus, -0.1, 0.1)


class RWKV7Block(Block):
    """RWKV-7 time mix, then channel mix."""

    carries = ("v_first",)

    def __init__(
        self, size: Size, index: int, grid: tuple[int, int], options: RWKV7Options
    ) -> None:
        super().__init__(index)
        self.depth, width = size.depth, size.width
        self.time = TimeMix7(width, index, options)
        mixer_params = sum(p.numel() for p in self.time.parameters()) + self.time.missing_params
        hidden = hidden_for(width, mixer_params, 2, width * width)
        self.channel = ChannelMix(width, hidden, options.missing)
        self.kernels = [("rwkv7", options.kernel), ("shift", "auto")]
        self.scans = (rotating_path(index),)
        self.tables = [("neighbours", options.missing)]

    def initialise(self) -> None:
        """Initialise the weights."""
        super().initialise()
        self.time.initialise(self.index, self.depth)
        self.channel.initialise(self.index, self.depth)

    def forward(
        self, x: Tensor, cond: Tensor, layout: Layout, state: dict[str, Tensor] | None = None
    ) -> Tensor:
        """Run the block on tokens (B, T, D) under its modulation (B, 6, 1, D).

        `state` carries the values of block 0.
        """
        state = {} if state is None else state
        ops = OPERATIONS[x.device.type]
        shift1, scale1, gate1, shift2, scale2, gate2 = cond.unbind(1)
        x = ops.gated_sum(x, gate1, self.time(ops.adaln(x, shift1, scale1), layout, state))
        return ops.gated_sum(x, gate2, self.channel(ops.adaln(x, shift2, scale2), layout))
