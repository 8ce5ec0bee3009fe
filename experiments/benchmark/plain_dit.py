"""A plain DiT with TREAD, to compare training steps with.

It follows a description of the official code's structure, not its text: each block projects its own
modulation, time and label embedders are separate, and a route draws one permutation per sample,
keeps its head unsorted, gathers with an expanded index, keeps a clone of all tokens and scatters
into another clone. Optimizer and EMA are torch's defaults, parameter by parameter. `compile=blocks`
compiles its blocks and its head: the official code uses torch.compile on their forward passes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from backbones.heads import sincos_2d, unpatchify
from backbones.sizes import Size, parse_size
from experiments.benchmark.bench_options import BenchOptions
from experiments.benchmark.random_latents import CLASSES, RandomLatents, open_gates
from experiments.components import compile_blocks
from experiments.diffusion import create_objective
from routing.rng import Draws
from routing.route import Route


def _modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class PlainBlock(nn.Module):
    """Attention and MLP, timm's, with adaLN-zero from this block's own projection of c."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        # Imported here: timm imports torchvision, which our own blocks do not need.
        from timm.layers import GELUTanh, Mlp
        from timm.models.vision_transformer import Attention

        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.attention = Attention(width, heads, qkv_bias=True)
        self.mlp = Mlp(width, 4 * width, act_layer=GELUTanh)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        """Run both branches on (B, T, D) under c (B, D)."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).chunk(6, dim=1)
        x = x + gate1.unsqueeze(1) * self.attention(_modulated(self.norm1(x), shift1, scale1))
        return x + gate2.unsqueeze(1) * self.mlp(_modulated(self.norm2(x), shift2, scale2))


class PlainHead(nn.Module):
    """The final norm with its own modulation, and the projection to patches."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.out = nn.Linear(width, outputs)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        """Project tokens (B, T, D) under c (B, D)."""
        shift, scale = self.modulation(c).chunk(2, dim=1)
        return self.out(_modulated(self.norm(x), shift, scale))


class PlainDiT(nn.Module):
    """DiT for square inputs of 4 channels, with a route or none."""

    def __init__(self, shape: Size, side: int, route: Route) -> None:
        super().__init__()
        width, patch, channels = shape.width, shape.patch, 4
        self.patch, self.route = patch, route
        self.embed = nn.Conv2d(channels, width, patch, patch)
        self.grid = (side // patch, side // patch)
        self.position = nn.Parameter(sincos_2d(width, self.grid)[None], requires_grad=False)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.labels = nn.Embedding(CLASSES + 1, width)
        self.blocks = nn.ModuleList(PlainBlock(width, shape.heads) for _ in range(shape.depth))
        self.head = PlainHead(width, patch * patch * channels)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Predict from images (B, C, H, W), times (B,) and labels (B,)."""
        x = self.embed(x).flatten(2).transpose(1, 2) + self.position
        waves = torch.exp(-math.log(10000) * torch.arange(128, device=t.device) / 128)
        angles = t[:, None].float() * waves
        c = self.time(torch.cat((angles.cos(), angles.sin()), 1)) + self.labels(y)
        rates, ends = {}, set()
        for segment in self.route.segments:
            rates[segment.start] = segment.rate
            ends.add(segment.end)
        saved, index = x, torch.empty(0)
        for i, block in enumerate(self.blocks):
            if i in rates:
                keep = x.shape[1] - int(x.shape[1] * rates[i])
                order = torch.argsort(torch.rand(x.shape[:2], device=x.device), dim=1)
                index = order[:, :keep, None].expand(-1, -1, x.shape[2])
                saved = x.clone()
                x = torch.gather(x, 1, index)
            x = block(x, c)
            if i in ends:
                x = saved.clone().scatter_(1, index, x.to(saved.dtype))
        return unpatchify(self.head(x, c), self.grid, self.patch)


class PlainStep:
    """A training step of a plain loop, always on the same batch of latents and labels."""

    def __init__(
        self, size: str, side: int, route: Route, o: BenchOptions, device: torch.device
    ) -> None:
        data = RandomLatents(side, o.batch, device)
        torch.manual_seed(0)
        self.model = PlainDiT(parse_size(size, o.depth), side, route).to(device)
        if o.compile == "blocks":
            compile_blocks(nn.ModuleList([*self.model.blocks, self.model.head]))
        open_gates(self.model)
        self.x, self.y, self.half, self.count = data.x, data.y, o.precision == "bf16", 0
        self.rows, self.objective = torch.arange(o.batch, device=device), create_objective("flow")
        self.params = [p for p in self.model.parameters() if p.requires_grad]
        self.ema = [p.detach().clone() for p in self.params]
        self.optimizer = torch.optim.AdamW(self.params, lr=1e-4, weight_decay=0.0)

    def loss(self) -> Tensor:
        """Sample noise and times, and run the forward pass."""
        draws = Draws(0, self.count, self.rows)
        drop = draws.uniform("drop", 1)[:, 0] < 0.1
        y = torch.where(drop, CLASSES, self.y)
        noise, time = draws.normal("noise", tuple(self.x.shape[1:])), self.objective.times(draws)
        with torch.autocast(self.x.device.type, torch.bfloat16, enabled=self.half):
            pair = self.objective.training_pair(self.x, noise, time)
            output = self.model(pair.inputs, pair.time, y=y)
            return self.objective.loss_map(output, pair).mean()

    def __call__(self) -> None:
        """Take one step, with an EMA update parameter by parameter."""
        self.loss().backward()
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for average, p in zip(self.ema, self.params, strict=True):
                average.mul_(0.9999).add_(p, alpha=1 - 0.9999)
        self.count += 1
