"""A plain DiT with TREAD, built as the official code is: what our steps are compared with.

Written from the description of that structure, not from its text: each block projects its own
modulation, time and label embedders are apart, and a route draws a random permutation per sample,
keeps its head unsorted, gathers with an expanded index, keeps a clone of all tokens and scatters
into another clone. Optimizer and EMA are torch's defaults, parameter by parameter. `compile=blocks`
compiles its blocks as it does ours: the official code has torch.compile on their forward pass.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.heads import sincos_2d
from backbones.sizes import Size
from experiments.diffusion import create_objective
from routing.rng import Draws


def _modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class PlainBlock(nn.Module):
    """Attention and MLP with adaLN-zero from this block's own projection of c."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        hidden = nn.Linear(width, 4 * width), nn.GELU(approximate="tanh")
        self.mlp = nn.Sequential(*hidden, nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def attention(self, x: Tensor) -> Tensor:
        """Self-attention over (B, T, D)."""
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(*qkv.unbind(0))
        return self.proj(out.transpose(1, 2).reshape(batch, tokens, width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        """Run both branches on (B, T, D) under c (B, D)."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).chunk(6, dim=1)
        x = x + gate1.unsqueeze(1) * self.attention(_modulated(self.norm1(x), shift1, scale1))
        return x + gate2.unsqueeze(1) * self.mlp(_modulated(self.norm2(x), shift2, scale2))


class PlainDiT(nn.Module):
    """DiT for square inputs of 4 channels, with one optional route: first and last block, share."""

    def __init__(
        self, shape: Size, side: int, classes: int, route: tuple[int, int, float] | None = None
    ) -> None:
        super().__init__()
        width, patch, channels = shape.width, shape.patch, 4
        self.patch, self.side, self.route, self.classes = patch, side, route, classes
        self.embed = nn.Conv2d(channels, width, patch, patch)
        grid = (side // patch, side // patch)
        self.position = nn.Parameter(sincos_2d(width, grid)[None], requires_grad=False)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.labels = nn.Embedding(classes + 1, width)
        self.blocks = nn.ModuleList(PlainBlock(width, shape.heads) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.out = nn.Linear(width, patch * patch * channels)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Predict from images (B, C, H, W), times (B,) and labels (B,)."""
        x = self.embed(x).flatten(2).transpose(1, 2) + self.position
        rates = torch.exp(-math.log(10000) * torch.arange(128, device=t.device) / 128)
        angles = t[:, None].float() * rates
        c = self.time(torch.cat((angles.cos(), angles.sin()), 1)) + self.labels(y)
        start, end, rate = self.route or (-1, -1, 0.0)
        saved, index = x, torch.empty(0)
        for i, block in enumerate(self.blocks):
            if i == start:
                keep = x.shape[1] - int(x.shape[1] * rate)
                order = torch.argsort(torch.rand(x.shape[:2], device=x.device), dim=1)
                index = order[:, :keep, None].expand(-1, -1, x.shape[2])
                saved = x.clone()
                x = torch.gather(x, 1, index)
            x = block(x, c)
            if i == end:
                x = saved.clone().scatter_(1, index, x.to(saved.dtype))
        shift, scale = self.modulation(c).chunk(2, dim=1)
        rows = self.out(_modulated(self.norm(x), shift, scale))
        side, p = self.side // self.patch, self.patch
        rows = rows.reshape(len(rows), side, side, p, p, -1)
        return torch.einsum("nhwpqc->nchpwq", rows).reshape(len(rows), -1, self.side, self.side)


class PlainStep:
    """A training step as a plain loop has it, always on one batch of latents and labels."""

    def __init__(self, model: PlainDiT, x: Tensor, y: Tensor, half: bool) -> None:
        self.model, self.x, self.y, self.half, self.count = model, x, y, half, 0
        self.rows, self.objective = torch.arange(len(x), device=x.device), create_objective("flow")
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.ema = [p.detach().clone() for p in self.params]
        self.optimizer = torch.optim.AdamW(self.params, lr=1e-4, weight_decay=0.0)

    def loss(self) -> Tensor:
        """Draw and run the forward pass."""
        draws = Draws(0, self.count, self.rows)
        drop = draws.uniform("drop", 1)[:, 0] < 0.1
        y = torch.where(drop, self.model.classes, self.y)
        noise, time = draws.normal("noise", tuple(self.x.shape[1:])), self.objective.times(draws)
        with torch.autocast(self.x.device.type, torch.bfloat16, enabled=self.half):
            return self.objective.loss(self.model, self.x, noise, time, y=y).float().mean()

    def __call__(self) -> None:
        """Take one step: the average follows one tensor after the other."""
        self.loss().backward()
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for average, p in zip(self.ema, self.params, strict=True):
                average.mul_(0.9999).add_(p, alpha=1 - 0.9999)
        self.count += 1
