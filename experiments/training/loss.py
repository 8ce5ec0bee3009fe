"""What one training step minimises, for every objective and routing variant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from backbones import Backbone
from backbones.backbone import Output
from experiments.config.schema import TrainConfig
from experiments.data.dataset import Batch
from experiments.diffusion import Objective
from experiments.diffusion.auxiliary_losses import (
    alignment_loss,
    ensemble_loss,
    maskdit_loss,
    masked_mean,
    patch_error,
    pixel_mask,
)
from routing.rng import Draws
from routing.stack import Routing


class Capture:
    """Calls the model, hands the objective its prediction, and keeps the rest of what it said."""

    def __init__(self, net: Any) -> None:
        self.net = net
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
    time = objective.times(draws)
    noise = draws.normal("noise", tuple(batch.x.shape[1:]))
    capture = Capture(net)
    cond = conditions(model, batch, draws, train.label_drop)
    terms = objective.loss(capture, batch.x, noise, time, **cond, routing=routing).float()
    output = capture.output

    def pair() -> tuple[Tensor, Tensor]:
        noisy = objective.corrupt(batch.x, noise, time)
        return objective.denoise(lambda *_, **__: output.sample, noisy, time), noisy

    loss = reduce(terms, output, model, train, pair)
    if encode is not None and output.aligned is not None and output.aligned_layout is not None:
        found = output.aligned_layout
        loss = loss + train.align_weight * alignment_loss(
            output.aligned.float(), encode(batch.x), found.ids
        )
    return loss


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
        # Tokens were dropped for good: they are not denoised, and with a decoder reconstructed
        # instead (MaskDiT).
        kept = output.kept.expand(len(terms), -1)
        if model.decoder is None:
            return masked_mean(terms, pixel_mask(kept, grid, patch))
        denoised, noisy = (x.float() for x in pair())
        # A patch of one value has no variance to normalise by.
        error = patch_error(denoised, noisy, patch, normalise=patch * patch * noisy.shape[1] > 1)
        return maskdit_loss(terms, error, ~kept, grid, train.mae_weight)
    if train.loss == "ensemble" and output.inner:
        dropped = [~layout.mask() for layout in output.inner]
        return ensemble_loss(terms, dropped, grid, train.mae_weight)
    return terms.mean()
