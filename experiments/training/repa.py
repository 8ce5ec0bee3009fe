"""REPA (Yu et al. 2025): align a block's tokens with a frozen encoder of the clean image.

`random` is a fixed random convolution pyramid: a control, and for tests. `probe` is the network
that reads scenes. `dinov2-*` are timm's, whose weights the user fetches (eval.dinov2_weights or
timm's own cache).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones import Output
from experiments.config.schema import Config
from experiments.data import probe
from experiments.data.dataset import Dataset
from experiments.diffusion.auxiliary_losses import alignment_loss
from experiments.evaluation.published_networks import build_dinov2, dinov2_input
from experiments.options.training import ENCODERS
from routing.errors import UserError


class FeatureAlignment:
    """REPA's loss for one run.

    Args:
        config: Names the encoder (`train.encoder`).
        dataset: Turns samples into pixels.
        grid: The model's tokens, (H, W): the encoder's features are pooled to it.
        device: Where the encoder runs.
    """

    blocks = None  # the encoder has no blocks like the model's

    def __init__(
        self, config: Config, dataset: Dataset, grid: tuple[int, int], device: torch.device
    ) -> None:
        self.name = config.train.encoder
        if not dataset.can_decode:
            raise UserError(f"train.encoder={self.name} needs images: {dataset.cannot_decode}")
        self.dataset, self.grid, self.device = dataset, grid, device
        encoder = make_encoder(self.name, config.eval.get("dinov2_weights"))
        self.encoder = encoder.to(device).eval().requires_grad_(False)

    def __call__(self, output: Output, x: Tensor, *_: Any) -> Tensor:
        """Return the alignment loss of a forward pass on clean samples `x` `(B, C, H, W)`.

        What the pass got beside them (noise, time, conditions) is of no use here.
        """
        assert output.aligned is not None and output.aligned_layout is not None, "REPA's projector"
        return alignment_loss(output.aligned.float(), self.encode(x), output.aligned_layout.ids)

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        """Return the features of clean samples `(B, C, H, W)` at the model's tokens, (B, N, E)."""
        pixels = self.dataset.to_pixels(x).to(self.device)
        with torch.autocast(self.device.type, enabled=False):
            features = feature_map(self.name, self.encoder, pixels)
        # One feature per token, whatever the encoder's own grid is.
        return F.adaptive_avg_pool2d(features, self.grid).flatten(2).transpose(1, 2)


def make_encoder(name: str, dinov2_weights: str | None) -> nn.Module:
    """Return the network of an encoder."""
    if name == "random":
        return random_pyramid(ENCODERS[name])
    if name == "probe":
        # A copy: the cached network stays on the device that scoring put it on.
        return copy.deepcopy(probe.load())
    return build_dinov2(name, dinov2_weights)


def random_pyramid(channels: int) -> nn.Module:
    """Return three fixed random convolutions to `channels` features; the same for every run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first, second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)
        last = nn.Conv2d(64, channels, 3, padding=1)
    return nn.Sequential(first, nn.GELU(), second, nn.GELU(), last)


def feature_map(name: str, network: Any, pixels: Tensor) -> Tensor:
    """Return an encoder's map of features (B, E, h, w) of uint8 images (B, 3, H, W)."""
    if name == "random":
        return network(pixels.float() / 127.5 - 1)
    if name == "probe":
        return network(pixels)["spatial"]
    tokens = network.forward_features(dinov2_input(pixels))[:, network.num_prefix_tokens :]
    side = int(tokens.shape[1] ** 0.5)
    return tokens.transpose(1, 2).unflatten(2, (side, side))
