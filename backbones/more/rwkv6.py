"""RWKV-6 (Finch, arXiv 2404.05892) for images: a matrix state with token-dependent decay.

The token shift is the two-dimensional one of `backbones.rwkv`, by the layout's table of neighbours;
each block scans one path, the next block another one (`layers.turns`).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers import Block, head_norm, turns
from backbones.more.rwkv6_spec import MatrixRWKVOptions
from backbones.ops.matrix_state import gla
from backbones.ops.shift import grid_shift
from backbones.rwkv import ChannelMix
from backbones.sizes import Size, hidden_for, low_rank, matrix_head
from routing.layout import Layout


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

    def __init__(
        self, size: Size, index: int, grid: tuple[int, int], options: MatrixRWKVOptions
    ) -> None:
        super().__init__(index)
        self.depth, width = size.depth, size.width
        self.time = self.mixer(width, index, options)
        spent = sum(p.numel() for p in self.time.parameters()) + self.time.left_out
        hidden = hidden_for(width, spent, 2, width * width)
        self.channel = ChannelMix(width, hidden, options.missing)
        self.operations = [(options.operation, options.kernel), ("shift", "auto")]
        self.lookups = [(Layout.neighbours, options.missing), (Layout.reorder, turns(index))]

    def initialise(self) -> None:
        """Draw weights."""
        super().initialise()
        self.time.initialise(self.index, self.depth)
        self.channel.initialise(self.index, self.depth)
