"""Precision and recall, KID, Inception Score and memorisation against libraries and hand-made cases."""

from __future__ import annotations

import math

import pytest
import torch

from experiments.evaluation import distances
from experiments.options.evaluation import MetricError


def rows(n: int, d: int, seed: int, offset: float = 0.0) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed)) + offset


def test_precision_and_recall_equal_torch_fidelity() -> None:
    from torch_fidelity.metric_prc import calculate_precision_recall_full

    for offset in (0.0, 0.8, 2.5):
        fake, real = rows(150, 6, 1, offset), rows(220, 6, 2)
        theirs = calculate_precision_recall_full(fake, real, neighborhood=3)
        assert distances.precision_recall(fake, real, 3) == pytest.approx(theirs, abs=1e-7)


def test_precision_is_of_the_samples_and_recall_of_the_reference() -> None:
    # All samples in one of two real clusters: every one is real, half of the reference is missed.
    left, right = rows(40, 2, 1), rows(40, 2, 2, 100.0)
    samples = left + 0.01
    precision, recall = distances.precision_recall(samples, torch.cat([left, right]), 3)
    assert precision == 1
    assert recall == pytest.approx(0.5, abs=0.05)


def test_blocks_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, real = rows(50, 4, 1, 0.5), rows(70, 4, 2)
    whole = (distances.precision_recall(fake, real), distances.memorisation(fake, real, rows(30, 4, 3)))
    monkeypatch.setattr(distances, "_ROWS", 7)
    assert whole == (distances.precision_recall(fake, real), distances.memorisation(fake, real, rows(30, 4, 3)))


def test_too_few_images_for_the_neighbours() -> None:
    with pytest.raises(MetricError, match="need more images"):
        distances.precision_recall(rows(3, 2, 1), rows(9, 2, 2), 3)


def test_kernel_distance_equals_torch_fidelity() -> None:
    from torch_fidelity.metric_kid import KEY_METRIC_KID_MEAN, kid_features_to_metric

    fake, real = rows(64, 16, 1, 0.3), rows(64, 16, 2)
    theirs = kid_features_to_metric(fake, real, kid_subsets=1, kid_subset_size=64, verbose=False)
    # One subset of everything: no choice is left to the generator.
    assert distances.kernel_distance(fake, real, 1, 64) == pytest.approx(theirs[KEY_METRIC_KID_MEAN], rel=1e-5)


def test_kernel_distance_is_unbiased_and_repeatable() -> None:
    same = [distances.kernel_distance(rows(40, 5, s), rows(40, 5, 99 + s), 1, 40) for s in range(60)]
    mean, spread = torch.tensor(same).mean().item(), torch.tensor(same).std().item()
    assert abs(mean) < 4 * spread / math.sqrt(len(same))
    fake, real = rows(90, 5, 1, 1.0), rows(90, 5, 2)
    once = distances.kernel_distance(fake, real, 5, 30, seed=3)
    assert once == distances.kernel_distance(fake, real, 5, 30, seed=3) > 0


def test_inception_score_equals_torch_fidelity_and_its_bounds() -> None:
    from torch_fidelity.metric_isc import KEY_METRIC_ISC_MEAN, isc_features_to_metric

    logits = rows(120, 10, 1) * 3
    theirs = isc_features_to_metric(logits, splits=4, shuffle=False)[KEY_METRIC_ISC_MEAN]
    assert distances.inception_score(logits, split_size=30) == pytest.approx(theirs, rel=1e-9)
    sure = torch.eye(10).repeat(5, 1) * 1e4
    assert distances.inception_score(sure) == pytest.approx(10)
    assert distances.inception_score(torch.zeros(20, 10)) == pytest.approx(1)


def test_memorisation_is_zero_for_copies_and_calibrated_on_new_images() -> None:
    train, held = rows(400, 3, 1), rows(400, 3, 2)
    copies, expected = distances.memorisation(train[:50], train, held)
    assert copies == 0
    fresh, _ = distances.memorisation(rows(400, 3, 3), train, held)
    # Equally many training and held-out images: new images are as near to the one as to the other.
    assert fresh == pytest.approx(1, abs=0.1)
    assert expected == pytest.approx(1, abs=0.1)
    near, _ = distances.memorisation(train[:50] + 1e-3, train, held)
    assert 0 < near < 0.1


def test_nearest_is_exact_for_copies_far_from_the_origin() -> None:
    data = rows(100, 8, 1, 1e3)
    assert torch.equal(distances.nearest(data[:9], data), torch.zeros(9, dtype=torch.float64))
    others = distances.nearest(data, data, skip_self=True)
    direct = torch.cdist(data.double(), data.double(), compute_mode="donot_use_mm_for_euclid_dist")
    direct.fill_diagonal_(torch.inf)
    # The search rounds in float32: it may take the second nearest, never a far one.
    assert (others >= direct.min(dim=1).values - 1e-9).all()
    assert (others <= direct.min(dim=1).values * 1.5).all()
