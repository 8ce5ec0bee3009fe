"""Frozen encoders for REPA (Yu et al. 2025): features of the clean image at the model's tokens.

`random` is a fixed random convolution pyramid: a control, and for tests. `probe` is the network
that reads scenes. `dinov2-*` are timm's, whose weights the user fetches (eval.dinov2_weights or
timm's own cache).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.config.schema import Config
from experiments.config.validation import ENCODERS
from experiments.data import probe
from experiments.data.dataset import Dataset
from experiments.metrics.pretrained import build_dinov2
from routing.errors import UserError

Encoder = Callable[[Tensor], Tensor]


def make_encoder(
    config: Config, dataset: Dataset, grid: tuple[int, int], device: torch.device
) -> Encoder:
    """Return a function from images (B, C, H, W) in model space to features (B, N, E)."""
    name = config.train.encoder
    if not dataset.can_decode:
        raise UserError(
            f"train.encoder={name} looks at pictures, and there are none: {dataset.cannot_decode}"
        )
    network: nn.Module
    if name == "random":
        network = RandomPyramid(ENCODERS[name])
    elif name == "probe":
        network = ProbeMap()
    else:
        network = DINOMap(name, config.eval.get("dinov2_weights"))
    network = network.to(device).eval().requires_grad_(False)

    @torch.no_grad()
    def encode(x: Tensor) -> Tensor:
        pixels = dataset.to_pixels(x).to(device)
        with torch.autocast(device.type, enabled=False):
            found = network(pixels)
        # One feature per token, whatever the encoder's own grid is.
        return F.adaptive_avg_pool2d(found, grid).flatten(2).transpose(1, 2)

    return encode


class RandomPyramid(nn.Module):
    """Three fixed random convolutions to `channels` features; the same for every run."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = nn.Sequential(
                nn.Conv2d(3, 32, 3, padding=1),
                nn.GELU(),
                nn.Conv2d(32, 64, 3, padding=1),
                nn.GELU(),
                nn.Conv2d(64, channels, 3, padding=1),
            )

    def forward(self, pixels: Tensor) -> Tensor:
        """Return features (B, channels, H, W) of uint8 pictures (B, 3, H, W)."""
        return self.layers(pixels.float() / 127.5 - 1)


class ProbeMap(nn.Module):
    """The last feature map of the network that reads scenes."""

    def __init__(self) -> None:
        super().__init__()
        # A copy: the cached network stays on the device that scoring put it on.
        self.network = copy.deepcopy(probe.load())

    def forward(self, pixels: Tensor) -> Tensor:
        """Return features (B, 96, 4, 4) of uint8 pictures (B, 3, 32, 32)."""
        return self.network(pixels)["spatial"]


class DINOMap(nn.Module):
    """Patch tokens of DINOv2 at 224 pixels, as a map."""

    def __init__(self, name: str, weights: str | None, pretrained: bool = True) -> None:
        super().__init__()
        self.network = build_dinov2(name, weights, pretrained)
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        """Return features (B, E, 16, 16) of uint8 pictures (B, 3, H, W)."""
        images = F.interpolate(
            pixels.float() / 255, (224, 224), mode="bicubic", antialias=True
        ).clamp(0, 1)
        network: Any = self.network
        tokens = network.forward_features((images - self.mean) / self.std)[
            :, network.num_prefix_tokens :
        ]
        side = int(tokens.shape[1] ** 0.5)
        return tokens.transpose(1, 2).unflatten(2, (side, side))
