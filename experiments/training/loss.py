"""Reduce a loss map: with permanently dropped tokens, or as the ensemble loss over routes."""

from __future__ import annotations

import torch
from torch import Tensor

from backbones import Backbone, Output
from experiments.diffusion import auxiliary_losses as losses
from experiments.diffusion.objective import Objective, TrainingPair
from experiments.options.training import TrainOptions


def reduce_loss(
    loss_map: Tensor,
    output: Output,
    pair: TrainingPair,
    objective: Objective,
    model: Backbone,
    train: TrainOptions,
) -> Tensor:
    """Reduce a loss map `(B, C, H, W)`, accounting for dropped tokens.

    Permanently dropped tokens are not denoised: without a decoder they have no loss, with one they
    are reconstructed (MaskDiT). The ensemble loss averages over the routes of the pass.
    """
    grid, patch = model.grid, model.size.patch
    if output.kept is not None:
        visible = output.kept.expand(len(loss_map), -1)
        if model.decoder is None:
            return losses.masked_mean(loss_map, losses.pixel_mask(visible, grid, patch))
        error = reconstruction_error(output.sample, pair, objective, patch)
        return losses.maskdit_loss(loss_map, error, ~visible, grid, train.mae_weight)
    if train.loss == "ensemble" and output.inner:
        dropped = [~layout.mask() for layout in output.inner]
        return losses.ensemble_loss(loss_map, dropped, grid, train.mae_weight)
    return loss_map.mean()


def reconstruction_error(
    output: Tensor, pair: TrainingPair, objective: Objective, patch: int
) -> Tensor:
    """Return MaskDiT's error per token, `(B, N)`: the denoised image against the noisy one."""
    output = output.to(torch.promote_types(output.dtype, torch.float32))
    denoised = objective.denoised(output, pair.noisy, pair.native_time)
    # A patch of one value has no variance to normalise by.
    normalise = patch * patch * pair.noisy.shape[1] > 1
    return losses.patch_error(denoised, pair.noisy, patch, normalise)
