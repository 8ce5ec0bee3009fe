"""Losses beside the objective's own: TREAD's first version, MaskDiT, REPA. Pure functions.

Token masks are bool `(B, N)`, true for tokens that were *dropped* (routed or masked), N = H W in
raster order; a grid is (H, W). Loss maps are those of `Objective.loss_map`, `(B, C, H p, W p)`,
where p is the side of a patch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backbones.heads import patchify


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


def alignment_loss(projected: Tensor, features: Tensor, ids: Tensor | None = None) -> Tensor:
    """Return REPA's loss (Yu et al. 2025, Equation 8): minus the mean cosine to a frozen encoder.

    Args:
        projected: A block's tokens after the projector, `(B, K, E)`.
        features: The encoder's tokens of the clean image, `(B, N, E)`.
        ids: Ids of the K tokens among the N, `(B, K)`, or `(1, K)` if the batch shares them; None
            if K = N. Inside a route only the tokens that stayed are aligned, as the TREAD authors
            do.
    """
    if ids is not None:
        ids = ids.expand(len(features), -1)
        features = features.gather(1, ids.unsqueeze(-1).expand(-1, -1, features.shape[-1]))
    if projected.shape != features.shape:
        # Other shapes could broadcast, silently.
        raise ValueError(f"tokens {tuple(projected.shape)}, features {tuple(features.shape)}")
    return -torch.nn.functional.cosine_similarity(projected, features.detach(), dim=-1).mean()
