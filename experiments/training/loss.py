"""What one training step minimises, for every objective and variant; REPA's frozen encoders."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones import Backbone, Output
from experiments.config.schema import ENCODERS, Config, TrainConfig
from experiments.data import probe
from experiments.data.dataset import Batch, Dataset
from experiments.diffusion import Objective
from experiments.diffusion import auxiliary_losses as losses
from experiments.evaluation.features import build_dinov2, dinov2_input
from routing.errors import UserError
from routing.rng import Draws
from routing.stack import Routing


class Capture:
    """Wraps the model and stores its auxiliary outputs; `dtype` is the type of its weights."""

    def __init__(self, net: Any, dtype: torch.dtype) -> None:
        self.net = net
        self.dtype = dtype
        self.output: Output

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        """Return the prediction."""
        self.output = self.net(x, t, **cond, return_output=True)
        return self.output.sample


def training_loss(
    net: Any,
    model: Backbone,
    objective: Objective,
    batch: Batch,
    draws: Draws,
    routing: Routing | None,
    train: TrainConfig,
    encode: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the mean loss of one piece of the global batch.

    `net` is called: the model, or its data-parallel wrapper. Of `draws` it takes the streams
    `sigma`, `noise` and `drop`. `encode` is REPA's frozen encoder, (B, C, H, W) -> (B, N, E).
    """
    capture = Capture(net, model.dtype)
    cond = conditions(model, batch, draws, train.label_drop)
    time = objective.times(draws)
    noise = draws.normal("noise", tuple(batch.x.shape[1:]))
    terms = _at_least_float32(
        objective.loss(capture, batch.x, noise, time, **cond, routing=routing)
    )
    output = capture.output

    def pair() -> tuple[Tensor, Tensor]:
        noisy = objective.corrupt(batch.x, noise, time)
        return objective.denoise(lambda *_, **__: output.sample, noisy, time), noisy

    loss = reduce(terms, output, model, train, pair)
    if encode is not None and output.aligned is not None and output.aligned_layout is not None:
        projected, ids = output.aligned.float(), output.aligned_layout.ids
        loss = loss + train.align_weight * losses.alignment_loss(projected, encode(batch.x), ids)
    return loss


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def conditions(model: Backbone, batch: Batch, draws: Draws, share: float) -> dict[str, Any]:
    """Return labels or captions, a `share` of them dropped for classifier-free guidance."""
    if not (model.num_classes or model.prefix):
        return {}
    drop = draws.uniform("drop", 1)[:, 0] < share
    cond: dict[str, Any] = {}
    if batch.y is not None and model.num_classes:
        # The class after the last one is the null class.
        cond["y"] = torch.where(drop, torch.full_like(batch.y, model.num_classes), batch.y)
    if model.prefix:
        cond |= {"text": batch.text, "text_drop": drop}
    return cond


def reduce(
    terms: Tensor,
    output: Output,
    model: Backbone,
    train: TrainConfig,
    pair: Callable[[], tuple[Tensor, Tensor]],
) -> Tensor:
    """Return the scalar of a loss map (B, C, H, W), given what became of the tokens.

    `pair` returns the denoised and the noisy images (B, C, H, W): what MaskDiT reconstructs with
    and from, the network's output after its preconditioning and its input before it.
    """
    grid, patch = model.grid, model.size.patch
    if output.kept is not None:
        # Tokens dropped for good are not denoised; a decoder reconstructs them instead (MaskDiT).
        kept = output.kept.expand(len(terms), -1)
        if model.decoder is None:
            return losses.masked_mean(terms, losses.pixel_mask(kept, grid, patch))
        denoised, noisy = (_at_least_float32(x) for x in pair())
        # A patch of one value has no variance to normalise by.
        normalise = patch * patch * noisy.shape[1] > 1
        error = losses.patch_error(denoised, noisy, patch, normalise)
        return losses.maskdit_loss(terms, error, ~kept, grid, train.mae_weight)
    if train.loss == "ensemble" and output.inner:
        dropped = [~layout.mask() for layout in output.inner]
        return losses.ensemble_loss(terms, dropped, grid, train.mae_weight)
    return terms.mean()


# --- REPA's encoders ------------------------------------------------------------------------------
#
# Features of the clean image at the model's tokens (Yu et al. 2025). `random` is a fixed random
# convolution pyramid: a control, and for tests. `probe` is the network that reads scenes.
# `dinov2-*` are timm's, whose weights the user fetches (eval.dinov2_weights or timm's own cache).

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
        network = random_pyramid(ENCODERS[name])
    elif name == "probe":
        # A copy: the cached network stays on the device that scoring put it on.
        network = copy.deepcopy(probe.load())
    else:
        network = build_dinov2(name, config.eval.get("dinov2_weights"))
    network = network.to(device).eval().requires_grad_(False)

    @torch.no_grad()
    def encode(x: Tensor) -> Tensor:
        pixels = dataset.to_pixels(x).to(device)
        with torch.autocast(device.type, enabled=False):
            found = _features(name, network, pixels)
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


def _features(name: str, network: Any, pixels: Tensor) -> Tensor:
    """Return an encoder's map of features (B, E, h, w) of uint8 pictures (B, 3, H, W)."""
    if name == "random":
        return network(pixels.float() / 127.5 - 1)
    if name == "probe":
        return network(pixels)["spatial"]
    tokens = network.forward_features(dinov2_input(pixels))[:, network.num_prefix_tokens :]
    side = int(tokens.shape[1] ** 0.5)
    return tokens.transpose(1, 2).unflatten(2, (side, side))
