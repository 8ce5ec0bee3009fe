"""DiT (Peebles and Xie, arXiv 2212.09748): attention and an MLP, both under adaLN-zero."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers import Block, RMSNorm, grid_angles
from backbones.ops.native import OPERATIONS
from backbones.options.dit import DiTOptions
from backbones.sizes import Size
from routing.layout import Layout


def rope_2d(size: int, grid: tuple[int, int]) -> Tensor:
    """Return the angles (H W, size / 2) of a head's channel pairs: half by row, half by column.

    Positions are row and column indices at every grid size (LightningDiT, arXiv 2501.01423, after
    EVA-02, with `pt_seq_len` equal to the side of the grid).
    """
    return torch.cat(grid_angles(size, grid), dim=1).float()


def rotation(angles: Tensor, layout: Layout) -> Tensor:
    """Return cos and sin (2, B or 1, 1, T, size / 2) for the tokens that are present.

    Prefix tokens have no place on the grid and are not rotated.
    """
    rows = layout.take(angles)
    if layout.prefix:
        rows = F.pad(rows, (0, 0, layout.prefix, 0))
    return torch.stack([rows.cos(), rows.sin()])[:, :, None]


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate channel pairs of queries or keys (B, heads, T, size) by `rotation`'s angles."""
    cos, sin = cos_sin.to(x.dtype)
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


# Tokens up to which two products are faster than torch's fused kernel for bfloat16 on CPUs (2.5
# times as fast at 64 tokens, slower at 1024).
SHORT = 512


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention of (B, heads, T, size), all of one type."""
    short = q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.shape[2] <= SHORT
    if not short:
        return F.scaled_dot_product_attention(q, k, v)
    with torch.autocast("cpu", enabled=False):
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        return torch.softmax(scores, -1) @ v


class Attention(nn.Module):
    """Multi-head self-attention through torch's fused kernel; it is permutation-equivariant.

    A routed subset only needs its own rows of the rotary table, which has one per patch.
    """

    angles: Tensor | None

    def __init__(self, width: int, heads: int, grid: tuple[int, int], options: DiTOptions) -> None:
        super().__init__()
        self.heads, size = heads, width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.q_norm = RMSNorm(size) if options.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(size) if options.qk_norm else nn.Identity()
        angles = rope_2d(size, grid) if options.rope else None
        self.register_buffer("angles", angles, persistent=False)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """Attend over all tokens (B, T, D)."""
        # Split along the axis that the projection wrote, so that the gradients of q, k and v are
        # joined in one copy.
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.angles is not None:
            cos_sin = rotation(self.angles, layout)
            q, k = rotate(q, cos_sin), rotate(k, cos_sin)
        out = attend(q.to(v.dtype), k.to(v.dtype), v)
        return self.proj(out.transpose(1, 2).flatten(2))


class DiTBlock(Block):
    """Attention, then an MLP of ratio 4 with tanh-approximated GELU."""

    def __init__(self, size: Size, index: int, grid: tuple[int, int], options: DiTOptions) -> None:
        super().__init__(index)
        self.attention = Attention(size.width, size.heads, grid, options)
        self.fc1 = nn.Linear(size.width, 4 * size.width)
        self.fc2 = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor, cond: Tensor, layout: Layout) -> Tensor:
        """Run the block on tokens (B, T, D) under its modulation (B, 6, 1, D)."""
        ops = OPERATIONS[x.device.type]
        shift1, scale1, gate1, shift2, scale2, gate2 = cond.unbind(1)
        x = ops.gated_sum(x, gate1, self.attention(ops.adaln(x, shift1, scale1), layout))
        hidden = ops.gelu(self.fc1(ops.adaln(x, shift2, scale2)))
        return ops.gated_sum(x, gate2, self.fc2(hidden))
