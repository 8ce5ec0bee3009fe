"""The losses beside the objective's own, against loops written out by hand."""

import pytest
import torch

from experiments.diffusion.auxiliary_losses import (
    alignment_loss,
    ensemble_loss,
    maskdit_loss,
    patch_error,
)

GRID, PATCH = (3, 2), 2


def loss_map(batch=2):
    torch.manual_seed(0)
    return torch.rand(batch, 4, GRID[0] * PATCH, GRID[1] * PATCH, dtype=torch.float64)


def by_token(loss):
    """Mean loss of each token, (B, N), by loops."""
    rows = []
    for image in loss:
        row = []
        for i in range(GRID[0]):
            for j in range(GRID[1]):
                y, x = i * PATCH, j * PATCH
                row.append(image[:, y : y + PATCH, x : x + PATCH].mean())
        rows.append(torch.stack(row))
    return torch.stack(rows)


DROPPED = torch.tensor([[1, 0, 0, 1, 0, 1], [0, 1, 0, 0, 1, 1]], dtype=torch.bool)


def test_patch_error():
    a, b = loss_map(), loss_map().flip(0)
    assert torch.allclose(patch_error(a, b, PATCH, normalise=False), by_token((a - b) ** 2))
    # A prediction of the normalised patches has no error, whatever the patches' mean and scale.
    zeros = patch_error(torch.zeros_like(b), b, PATCH)
    assert torch.allclose(zeros, patch_error(torch.zeros_like(b), 7 * b - 3, PATCH), atol=1e-3)
    elements = 4 * PATCH**2
    assert torch.allclose(zeros, torch.full_like(zeros, (elements - 1) / elements), atol=1e-3)


def test_maskdit_loss():
    loss, rebuilt = loss_map(), torch.rand(2, 6, dtype=torch.float64)
    expected = by_token(loss)[~DROPPED].mean() + 0.1 * rebuilt[DROPPED].mean()
    assert torch.allclose(maskdit_loss(loss, rebuilt, DROPPED, GRID), expected)
    assert torch.allclose(maskdit_loss(loss, rebuilt, torch.zeros_like(DROPPED), GRID), loss.mean())


def test_ensemble_loss():
    loss, masks = loss_map(), [DROPPED, ~DROPPED, DROPPED.flip(0)]
    terms = [by_token(loss)[~mask].mean() + 0.3 * by_token(loss)[mask].mean() for mask in masks]
    assert torch.allclose(ensemble_loss(loss, masks, GRID, weight=0.3), sum(terms) / 3)
    # Half of the tokens dropped and weight 1: twice the plain mean.
    assert torch.allclose(ensemble_loss(loss, masks[:1], GRID, 1.0), 2 * loss.mean())


def test_alignment_is_of_the_kept_tokens():
    features = torch.randn(2, 6, 5)
    ids = torch.tensor([[0, 3], [2, 5]])
    kept = torch.stack([features[0, [0, 3]], features[1, [2, 5]]])
    assert alignment_loss(3 * kept, features, ids) == pytest.approx(-1)
    assert alignment_loss(-kept, features, ids) == pytest.approx(1)
    assert alignment_loss(features, features) == pytest.approx(-1)
    shared = features[:, ids[0]]
    assert alignment_loss(shared, features, ids[:1]) == pytest.approx(-1)
    with pytest.raises(ValueError, match="features"):
        alignment_loss(shared[:, :1], features, ids[:1])
    # The encoder is frozen.
    features.requires_grad_()
    projected = kept.detach().clone().requires_grad_()
    alignment_loss(projected, features, ids).backward()
    assert features.grad is None and projected.grad is not None
