"""Your own backbone in one file: minGRU (arXiv 2410.01201), trained by this suite's command.

TREAD_BACKBONES=$PWD/examples/mingru.py python -m experiments.run backbone=mingru route=2-8
"""

import sys
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers import Block, SwiGLU, rotating_path
from backbones.ops.native import OPERATIONS
from backbones.registry import BlockCost, Spec, register
from backbones.sizes import Size, hidden_for
from routing import Layout


@dataclass(frozen=True)
class Options:
    """What `backbone.KEY=` sets: types and ranges are checked, `--help` shows the comments."""

    gate: Annotated[bool, "Gate the recurrence's output, as Mamba does."] = True


class MinGRU(nn.Module):
    """h_t = (1 - z_t) h_{t-1} + z_t v_t, with gates z and values v > 0 of x_t alone."""

    def __init__(self, width: int, gate: bool) -> None:
        super().__init__()
        self.into = nn.Linear(width, (3 if gate else 2) * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """Mix tokens (B, T, D), which come in scan order; in a route, the absent ones are gone."""
        z, v, *gate = self.into(x).split(x.shape[-1], dim=-1)
        z, v = z.float(), v.float()
        decay = -F.softplus(z).cumsum(1)  # the sum of log(1 - z), so that products are sums
        wrote = -F.softplus(-z) + torch.where(v >= 0, (v.relu() + 0.5).log(), F.logsigmoid(v))
        h = (decay + torch.logcumsumexp(wrote - decay, 1)).exp().to(x.dtype)
        return self.out(h * F.silu(*gate) if gate else h)


class MinGRUBlock(Block):
    """The scan, then SwiGLU, each under adaLN and a gate."""

    def __init__(self, size: Size, index: int, grid: tuple[int, int], options: Options) -> None:
        super().__init__(index)
        self.scans = (rotating_path(index),)  # rows and columns, forward and back, block by block
        self.mixer = MinGRU(size.width, options.gate)
        spent = sum(p.numel() for p in self.mixer.parameters())
        self.mlp = SwiGLU(size.width, hidden_for(size.width, spent, 3), bias=False)

    def forward(self, x: Tensor, cond: Tensor, layout: Layout) -> Tensor:
        """Run the block on tokens (B, T, D) under its modulation (B, 6, 1, D)."""
        ops = OPERATIONS[x.device.type]
        shift1, scale1, gate1, shift2, scale2, gate2 = cond.unbind(1)
        order = layout.scan_order(self.scans[0])  # adaLN sorts into scan order, the sum sorts back
        x = ops.gated_sum(x, gate1, self.mixer(ops.adaln(x, shift1, scale1, order), layout), order)
        return ops.gated_sum(x, gate2, self.mlp(ops.adaln(x, shift2, scale2), layout))


def block_cost(size: Size, index: int, grid: tuple[int, int], options: Options) -> BlockCost:
    """Count 12 D^2 parameters, as in every family, and 2 D products a token in the scan."""
    d, mixer = size.width, (4 if options.gate else 3) * size.width**2
    hidden = hidden_for(d, mixer, 3)
    linear = mixer + 3 * d * hidden
    return BlockCost(linear, linear, lambda tokens: 2 * d * tokens, saved=20 * d + 5 * hidden)


register(Spec("mingru", Options, block_cost, f"{__name__}:MinGRUBlock"))

if __name__ == "__main__":  # python examples/mingru.py: a short run of the same command
    from experiments.run import start

    sys.argv[1:1] = ["backbone=mingru", "route=2-4", "train.steps=100", "eval=none"]
    sys.exit(start())
