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

from experiments.config.schema import ENCODERS, Config
from experiments.data import probe
from experiments.data.dataset import Dataset
from experiments.metrics.features import build_dinov2, dinov2_input
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
    if name == "random":
        network, features = random_pyramid(ENCODERS[name]), _of_pyramid
    elif name == "probe":
        # A copy: the cached network stays on the device that scoring put it on.
        network, features = copy.deepcopy(probe.load()), _of_probe
    else:
        network, features = build_dinov2(name, config.eval.get("dinov2_weights")), _of_dinov2
    network = network.to(device).eval().requires_grad_(False)

    @torch.no_grad()
    def encode(x: Tensor) -> Tensor:
        pixels = dataset.to_pixels(x).to(device)
        with torch.autocast(device.type, enabled=False):
            found = features(network, pixels)
        # One feature per token, whatever the encoder's own grid is.
        return F.adaptive_avg_pool2d(found, grid).flatten(2).transpose(1, 2)

    return encode


def random_pyramid(channels: int) -> nn.Module:
    """Return three fixed random convolutions to `channels` features; the same for every run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first, second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)
        last = nn.Conv2d(64, channels, 3, padding=1)
    return nn.Sequential(first, nn.GELU(), second, nn.GELU(), last)


# Maps of features (B, E, h, w) of uint8 pictures (B, 3, H, W).


def _of_pyramid(network: Any, pixels: Tensor) -> Tensor:
    return network(pixels.float() / 127.5 - 1)


def _of_probe(network: Any, pixels: Tensor) -> Tensor:
    return network(pixels)["spatial"]


def _of_dinov2(network: Any, pixels: Tensor) -> Tensor:
    tokens = network.forward_features(dinov2_input(pixels))[:, network.num_prefix_tokens :]
    side = int(tokens.shape[1] ** 0.5)
    return tokens.transpose(1, 2).unflatten(2, (side, side))
