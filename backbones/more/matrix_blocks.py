"""Blocks with a matrix state and token-dependent decays: GLA, RWKV-6 and RWKV-7.

Gated linear attention is arXiv 2312.06635 as a diffusion block, after DiG (arXiv 2405.18428);
RWKV-6 is Finch (arXiv 2404.05892); RWKV-7 is Goose (arXiv 2503.14456), whose state is also
rewritten along one direction. A block scans one path with its state, the next block another one:
forward and reversed, along rows and along columns, in turn (`layers.turns`). The RWKVs' token shift
is the two-dimensional one of `backbones.rwkv`, by the layout's table of neighbours.

In RWKV-7 the values of the first block travel with the tokens as `v_first`: later blocks mix them
in, so a route gathers and scatters them like the residual stream (`carries`).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers import Block, SwiGLU, head_norm, turns
from backbones.more.more_spec import GLAOptions, MatrixRWKVOptions
from backbones.ops.matrix_state import gla, rwkv7
from backbones.ops.shift import grid_shift
from backbones.rwkv import ChannelMix, Shift
from backbones.sizes import Size, hidden_for, low_rank, matrix_head
from routing.layout import Layout

TEMPER = 16.0  # The decay is sigmoid(.)^(1/16): near 1 at the start, so that memory is long.
SLOWEST = math.exp(-0.5)  # Log decays lie in (-e^-0.5, 0): 54 % of the state stay at least.


class GatedLinearAttention(nn.Module):
    """Token mixer: y_t = q_t^T S_t with S_t = diag(a_t) S_{t-1} + k_t v_t^T, normalised and gated.

    Queries and keys have half the width, as in the paper.
    """

    def __init__(self, width: int, kernel: str) -> None:
        super().__init__()
        self.kernel = kernel
        self.narrow, self.heads = width // 2, width // matrix_head(width)
        rank = low_rank(width)
        self.qkv = nn.Linear(width, 2 * self.narrow + 2 * width, bias=False)
        self.decay_down = nn.Linear(width, rank, bias=False)
        self.decay_up = nn.Linear(rank, self.narrow)
        self.norm = nn.GroupNorm(self.heads, width, eps=1e-5)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """Mix tokens (B, T, D) that are in scan order."""
        width = x.shape[-1]
        q, k, v, gate = self.qkv(x).split([self.narrow, self.narrow, width, width], dim=-1)
        logits = self.decay_up(self.decay_down(x))
        g = F.logsigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32))) / TEMPER
        q, k, v, g = (z.unflatten(-1, (self.heads, -1)) for z in (q, k, v, g))
        y = gla(q * q.shape[-1] ** -0.5, k, v, g, kernel=self.kernel)
        return self.output(head_norm(y, self.norm) * F.silu(gate))


class GLABlock(Block):
    """Gated linear attention, then SwiGLU."""

    branches = ("mixer", "mlp")

    def __init__(self, size: Size, index: int, grid: tuple[int, int], options: GLAOptions) -> None:
        super().__init__(index)
        self.scans = (turns(index), None)
        self.mixer = GatedLinearAttention(size.width, options.kernel)
        spent = sum(p.numel() for p in self.mixer.parameters())
        self.mlp = SwiGLU(size.width, hidden_for(size.width, spent, 3), bias=False)
        self.operations = [("gla", options.kernel)]


def decay_speed(width: int, index: int, depth: int) -> Tensor:
    """Return RWKV's start of the decay (D,): -6 to -1, steeper over the channels in deep blocks."""
    ramp = torch.arange(width, dtype=torch.float32) / max(width - 1, 1)
    return -6 + 5 * ramp ** (0.7 + 1.3 * index / max(depth - 1, 1))


class TimeMix6(nn.Module):
    """Token mixer: five token-dependent mixtures with the neighbours, then the scan.

    x_i = x + (shift(x) - x) (mu_i + B_i tanh(A_i (x + (shift(x) - x) mu)))
    y = W_o (norm(gla(r, k, v, -exp(w0 + B tanh(A x_w)), u)) silu(g))
    """

    left_out = 0  # Parameters that another block of the stack has and this one has not.

    def __init__(self, width: int, index: int, options: MatrixRWKVOptions) -> None:
        super().__init__()
        self.path, self.missing, self.kernel = turns(index), options.missing, options.kernel
        self.heads, rank = width // matrix_head(width), low_rank(width) // 2
        self.mix = nn.Parameter(torch.full((6, width), 0.5))
        self.mix_down = nn.Linear(width, 5 * rank, bias=False)
        self.mix_up = nn.Parameter(torch.empty(5, rank, width))
        self.receptance = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, width, bias=False)
        self.decay_down = nn.Linear(width, low_rank(width), bias=False)
        self.decay_up = nn.Linear(low_rank(width), width)
        self.bonus = nn.Parameter(torch.zeros(self.heads, width // self.heads))
        self.norm = nn.GroupNorm(self.heads, width, eps=64e-5)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """Mix tokens (B, T, D)."""
        away = grid_shift(x, layout.neighbours(self.missing)) - x
        # Pointwise from here on, so the D-wide inputs are permuted, not the five mixtures.
        x, away = layout.to_scan(x, self.path), layout.to_scan(away, self.path)
        hidden = torch.tanh(self.mix_down(x + away * self.mix[5])).unflatten(-1, (5, -1))
        shares = torch.einsum("btir,ird->ibtd", hidden, self.mix_up.to(hidden.dtype))
        mixed = [x + away * (self.mix[i] + shares[i]) for i in range(5)]
        logits = self.decay_up(torch.tanh(self.decay_down(mixed[4])))
        g = -torch.exp(logits.to(torch.promote_types(logits.dtype, torch.float32)))
        layers = (self.receptance, self.key, self.value)
        r, k, v = (layer(z) for layer, z in zip(layers, mixed[:3], strict=True))
        r, k, v, g = (z.unflatten(-1, (self.heads, -1)) for z in (r, k, v, g))
        y = head_norm(gla(r, k, v, g, self.bonus, kernel=self.kernel), self.norm)
        return layout.from_scan(self.output(y * F.silu(self.gate(mixed[3]))), self.path)

    def initialise(self, index: int, depth: int) -> None:
        """Draw corrections, decays and bonus."""
        width = self.decay_up.out_features
        nn.init.uniform_(self.mix_up, -0.01, 0.01)
        self.mix.copy_((torch.arange(width) / width).pow(1 - index / depth).expand(6, -1))
        self.decay_up.weight.mul_(0.1)
        self.decay_up.bias.copy_(decay_speed(width, index, depth))
        nn.init.uniform_(self.bonus, -0.5, 0.5)


class RWKV6Block(Block):
    """RWKV-6 time mix, then channel mix."""

    branches = ("time", "channel")
    mixer: Callable[[int, int, MatrixRWKVOptions], Any] = TimeMix6
    operation = "rwkv6"

    def __init__(
        self, size: Size, index: int, grid: tuple[int, int], options: MatrixRWKVOptions
    ) -> None:
        super().__init__(index)
        self.depth, width = size.depth, size.width
        self.time = self.mixer(width, index, options)
        spent = sum(p.numel() for p in self.time.parameters()) + self.time.left_out
        hidden = hidden_for(width, spent, 2, width * width)
        self.channel = ChannelMix(width, hidden, options.missing)
        self.operations = [(self.operation, options.kernel), ("shift", "auto")]
        self.lookups = [(Layout.neighbours, options.missing), (Layout.reorder, turns(index))]

    def initialise(self) -> None:
        """Draw weights."""
        super().initialise()
        self.time.initialise(self.index, self.depth)
        self.channel.initialise(self.index, self.depth)


class LowRank(nn.Module):
    """A token-dependent vector by a small bottleneck: bias + B f(A x)."""

    def __init__(self, width: int, bias: bool = True) -> None:
        super().__init__()
        self.down = nn.Linear(width, low_rank(width), bias=False)
        self.up = nn.Linear(low_rank(width), width, bias=bias)

    def forward(self, x: Tensor, squash: bool = False) -> Tensor:
        """Map tokens (B, T, D)."""
        low = self.down(x)
        return self.up(torch.tanh(low) if squash else low)


class TimeMix7(nn.Module):
    """Token mixer of RWKV-7.

    With kk the unit-length key, a rate alpha in 0..1 and a log decay g, the state does
    S <- diag(e^g) S - kk alpha (kk^T S) + k v^T, that is, it forgets what kk pointed at.
    """

    def __init__(self, width: int, index: int, options: MatrixRWKVOptions) -> None:
        super().__init__()
        self.path, self.kernel = turns(index), options.kernel
        self.heads = width // matrix_head(width)
        self.shift = Shift(width, 6, options.missing)
        self.receptance = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.decay, self.rate = LowRank(width), LowRank(width)
        self.blend = LowRank(width) if index else None
        # Every block has the same hidden width, the first one, without `blend`, too.
        self.left_out = 0 if index else 2 * width * low_rank(width) + width
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
        own = (r * k * self.bonus).sum(-1, keepdim=True) * v
        r, g, k, v, a, b = (self._scan(z, layout) for z in (r, g, k, v, -unit, unit * rate))
        y = rwkv7(r, g, k, v, a, b, kernel=self.kernel)
        y = layout.from_scan(head_norm(y, self.norm), self.path)
        gate = self.gate(torch.sigmoid(inputs[5]))
        return self.output((y + own.flatten(-2)) * gate)

    def _scan(self, z: Tensor, layout: Layout) -> Tensor:
        return layout.to_scan(z.flatten(-2), self.path).unflatten(-1, (self.heads, -1))

    def initialise(self, index: int, depth: int) -> None:
        """Draw decays, rates and mixtures."""
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


class RWKV7Block(RWKV6Block):
    """RWKV-7 time mix, then channel mix."""

    carries = ("v_first",)
    mixer = TimeMix7
    operation = "rwkv7"

    def forward(
        self, x: Tensor, cond: Tensor, layout: Layout, state: dict[str, Tensor] | None = None
    ) -> Tensor:
        """Run both branches on tokens (B, T, D); `state` carries the values of block 0."""
        state = {} if state is None else state
        return self.run(x, cond, layout, partial(self.time, state=state), self.channel)
