"""Auxiliary losses: TREAD's first version, MaskDiT, REPA and SRA. Pure functions.

Token masks are bool `(B, N)`, true for tokens that were *dropped* (routed or masked), N = H W in
raster order; a grid is (H, W). Loss maps are those of `Objective.loss_map`, `(B, C, H p, W p)`,
where p is the side of a patch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from backbones.heads import patchify

SMOOTH_L1_BETA = 0.05  # Of SRA: where its loss turns from a square to a line.


def pixel_mask(dropped: Tensor, grid: tuple[int, int], patch: int) -> Tensor:
    """Return a token mask (B, N) at the resolution of the image, (B, 1, H p, W p)."""
    image = dropped.reshape(-1, 1, *grid)
    return image.repeat_interleave(patch, 2).repeat_interleave(patch, 3)


def masked_mean(loss: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of `loss` where `mask` (its shape, or (B, 1, H, W)) is true; 0 if nowhere."""
    weight = mask.to(loss.dtype).expand_as(loss)
    return (loss * weight).sum() / weight.sum().clamp(min=1)


def patch_error(prediction: Tensor, target: Tensor, patch: int, normalise: bool = True) -> Tensor:
    """Return each patch's mean squared error, `(B, N)`: the term of a masked autoencoder.

    Both are images `(B, C, H p, W p)`. In MaskDiT the prediction is the denoised image D,
    preconditioned, and the target the noisy image; TREAD's first version reconstructs the clean
    one. `normalise` brings each target patch to mean 0 and variance 1 first, as MAE and MaskDiT do.
    """
    predicted_patches, target_patches = patchify(prediction, patch), patchify(target, patch)
    if normalise:
        mean = target_patches.mean(-1, keepdim=True)
        variance = target_patches.var(-1, keepdim=True)
        target_patches = (target_patches - mean) / (variance + 1e-6).sqrt()
    return (predicted_patches - target_patches).square().mean(-1)


def maskdit_loss(
    loss: Tensor,
    reconstruction: Tensor,
    dropped: Tensor,
    grid: tuple[int, int],
    weight: float = 0.1,
) -> Tensor:
    """Return MaskDiT's loss (Zheng et al. 2024): denoise visible tokens, reconstruct masked ones.

    The `reconstruction` is `patch_error` of every token, `(B, N)`; MaskDiT's weight of it is 0.1.
    """
    visible = pixel_mask(~dropped, grid, loss.shape[-1] // grid[1])
    return masked_mean(loss, visible) + weight * masked_mean(reconstruction, dropped)


def ensemble_loss(
    loss: Tensor, dropped: Sequence[Tensor], grid: tuple[int, int], weight: float = 0.1
) -> Tensor:
    """Return the loss of TREAD's first version over the routes of one pass.

    `L = mean_k ( dsm_k + weight * mae_k )`, where `dsm_k` is the objective's loss on the tokens
    that stayed in route k and `mae_k` the same error on those that skipped it. Both are means over
    their tokens; there is at least one route. The paper's weight of the skipped tokens is not
    published; 0.1 is MaskDiT's.
    """
    terms = []
    for tokens in dropped:
        pixels = pixel_mask(tokens, grid, loss.shape[-1] // grid[1])
        terms.append(masked_mean(loss, ~pixels) + weight * masked_mean(loss, pixels))
    return torch.stack(terms).mean()


def alignment_loss(
    projected: Tensor, features: Tensor, ids: Tensor | None = None, form: str = "cosine"
) -> Tensor:
    """Return the distance of a block's tokens to the features that they are aligned with.

    `cosine` is minus the mean cosine (REPA, Yu et al. 2025, Equation 8). `smooth_l1` is SRA's first
    form (arXiv 2505.02831, released code): the mean over all entries of d^2 / (2 b) where the
    difference d is less than b = 0.05, and |d| - b / 2 beyond.

    Args:
        projected: A block's tokens after the projector, `(B, K, E)`.
        features: The encoder's tokens of the clean image, or the EMA's, `(B, N, E)`.
        ids: Ids of the K tokens among the N, `(B, K)`, or `(1, K)` if the batch shares them; None
            if K = N. Inside a route only the tokens that stayed are aligned, as the TREAD authors
            do.
        form: `cosine` or `smooth_l1`.
    """
    if ids is not None:
        ids = ids.expand(len(features), -1)
        features = features.gather(1, ids.unsqueeze(-1).expand(-1, -1, features.shape[-1]))
    if projected.shape != features.shape:
        # Other shapes could broadcast, silently.
        raise ValueError(f"tokens {tuple(projected.shape)}, features {tuple(features.shape)}")
    features = features.detach()
    if form == "smooth_l1":
        return F.smooth_l1_loss(projected, features, beta=SMOOTH_L1_BETA)
    return -F.cosine_similarity(projected, features, dim=-1).mean()
