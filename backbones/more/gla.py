"""Gated linear attention (arXiv 2312.06635) as a diffusion block, after DiG (arXiv 2405.18428).

A block scans one path with a matrix state, the next block another one: forward and reversed, along
rows and along columns, in turn. Only the mixer sees that order (`Block.scans`); the residual stream
stays in raster order.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers import Block, SwiGLU, head_norm, turns
from backbones.more.more_spec import GLAOptions
from backbones.ops.matrix_state import gla
from backbones.sizes import Size, hidden_for, low_rank, matrix_head
from routing.layout import Layout

TEMPER = 16.0  # The decay is sigmoid(.)^(1/16): near 1 at the start, so that memory is long.


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
