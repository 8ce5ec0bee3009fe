"""Moments, Frechet distance, precision, recall, KID, Inception Score, memorisation: against libraries and closed forms."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from experiments.evaluation import Moments, SingularCovarianceWarning, distances, frechet_distance
from routing.errors import UserError


def rows(n, d, seed, offset=0.0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed)) + offset


def test_precision_and_recall_equal_torch_fidelity():
    from torch_fidelity.metric_prc import calculate_precision_recall_full

    for offset in (0.0, 0.8, 2.5):
        fake, real = rows(150, 6, 1, offset), rows(220, 6, 2)
        theirs = calculate_precision_recall_full(fake, real, neighborhood=3)
        assert distances.precision_recall(fake, real, 3) == pytest.approx(theirs, abs=1e-7)


def test_blocks_make_no_difference(monkeypatch):
    fake, real = rows(50, 4, 1, 0.5), rows(70, 4, 2)
    whole = (distances.precision_recall(fake, real), distances.memorisation(fake, real, rows(30, 4, 3)))
    monkeypatch.setattr(distances, "_ROWS", 7)
    assert whole == (distances.precision_recall(fake, real), distances.memorisation(fake, real, rows(30, 4, 3)))


def test_kernel_distance_equals_torch_fidelity():
    from torch_fidelity.metric_kid import KEY_METRIC_KID_MEAN, kid_features_to_metric

    fake, real = rows(64, 16, 1, 0.3), rows(64, 16, 2)
    theirs = kid_features_to_metric(fake, real, kid_subsets=1, kid_subset_size=64, verbose=False)
    # One subset of everything: no choice is left to the generator.
    assert distances.kernel_distance(fake, real, 1, 64) == pytest.approx(theirs[KEY_METRIC_KID_MEAN], rel=1e-5)


def test_kernel_distance_is_unbiased_and_repeatable():
    same = [distances.kernel_distance(rows(40, 5, s), rows(40, 5, 99 + s), 1, 40) for s in range(60)]
    mean, spread = torch.tensor(same).mean().item(), torch.tensor(same).std().item()
    assert abs(mean) < 4 * spread / math.sqrt(len(same))
    fake, real = rows(90, 5, 1, 1.0), rows(90, 5, 2)
    assert distances.kernel_distance(fake, real, 5, 30) == distances.kernel_distance(fake, real, 5, 30) > 0


def test_inception_score_equals_torch_fidelity_and_its_bounds():
    from torch_fidelity.metric_isc import KEY_METRIC_ISC_MEAN, isc_features_to_metric

    logits = rows(120, 10, 1) * 3
    theirs = isc_features_to_metric(logits, splits=4, shuffle=False)[KEY_METRIC_ISC_MEAN]
    assert distances.inception_score(logits, split_size=30) == pytest.approx(theirs, rel=1e-9)
    sure = torch.eye(10).repeat(5, 1) * 1e4
    assert distances.inception_score(sure) == pytest.approx(10)
    assert distances.inception_score(torch.zeros(20, 10)) == pytest.approx(1)


def test_memorisation_is_zero_for_copies_and_calibrated_on_new_images():
    train, held = rows(400, 3, 1), rows(400, 3, 2)
    copies, expected = distances.memorisation(train[:50], train, held)
    assert copies == 0
    fresh, _ = distances.memorisation(rows(400, 3, 3), train, held)
    # Equally many training and held-out images: new images are as near to the one as to the other.
    assert fresh == pytest.approx(1, abs=0.1)
    assert expected == pytest.approx(1, abs=0.1)
    near, _ = distances.memorisation(train[:50] + 1e-3, train, held)
    assert 0 < near < 0.1


def test_nearest_is_exact_for_copies_far_from_the_origin():
    data = rows(100, 8, 1, 1e3)
    assert torch.equal(distances.nearest(data[:9], data), torch.zeros(9, dtype=torch.float64))
    others = distances.nearest(data, data, skip_self=True)
    direct = torch.cdist(data.double(), data.double(), compute_mode="donot_use_mm_for_euclid_dist")
    direct.fill_diagonal_(torch.inf)
    # The search rounds in float32: it may take the second nearest, never a far one.
    assert (others >= direct.min(dim=1).values - 1e-9).all()
    assert (others <= direct.min(dim=1).values * 1.5).all()


def spread_rows(n, d, seed=0, offset=0.0):
    return rows(n, d, seed) * torch.linspace(0.1, 3, d) + offset


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 17), min_size=1, max_size=6), st.integers(0, 5))
def test_batches_and_merges_equal_one_pass(sizes, split):
    assume(sum(sizes) >= 2)
    data = spread_rows(sum(sizes), 5, seed=sum(sizes), offset=1e4)
    parts = data.split(sizes)
    first, second = Moments(5), Moments(5)
    for part in parts[:split]:
        first.update(part)
    for part in parts[split:]:
        second.update(part)
    if second.n:
        first.merge_parts(second.n, second.mean, second.scatter)
    mu, sigma = first.finish()
    assert first.n == len(data)
    np.testing.assert_allclose(mu, data.double().mean(0).numpy(), rtol=1e-12)
    np.testing.assert_allclose(sigma, np.cov(data.double().numpy(), rowvar=False), rtol=1e-8, atol=1e-9)


def test_known_distances_between_gaussians():
    a, b = np.array([1.0, 4.0, 9.0]), np.array([4.0, 1.0, 0.25])
    mu = np.array([1.0, -2.0, 0.5])
    # Covariances that commute: |mu|^2 + sum (sqrt a - sqrt b)^2.
    expected = mu @ mu + ((np.sqrt(a) - np.sqrt(b)) ** 2).sum()
    found = frechet_distance(np.zeros(3), np.diag(a), mu, np.diag(b))
    assert found == pytest.approx(expected, rel=1e-13)
    rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0]
    turned = [rotation @ np.diag(v) @ rotation.T for v in (a, b)]
    assert frechet_distance(np.zeros(3), turned[0], mu, turned[1]) == pytest.approx(expected, rel=1e-12)
    # Covariances that do not commute, in 2-D: tr sqrt(M) = sqrt(tr M + 2 sqrt(det M)).
    s1, s2 = np.array([[2.0, 0.7], [0.7, 1.0]]), np.array([[1.0, -0.3], [-0.3, 3.0]])
    m = s1 @ s2
    cross = math.sqrt(np.trace(m) + 2 * math.sqrt(np.linalg.det(m)))
    closed = np.trace(s1) + np.trace(s2) - 2 * cross
    assert frechet_distance(np.zeros(2), s1, np.zeros(2), s2) == pytest.approx(closed, rel=1e-12)


@pytest.mark.parametrize("d", [3, 40])
def test_equals_torch_fidelity_and_scipy(d):
    from scipy import linalg
    from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric

    x, y = spread_rows(300, d, 1).double(), spread_rows(200, d, 2, offset=0.4).double()
    statistics = [fid_features_to_statistics(rows) for rows in (x, y)]
    theirs = fid_statistics_to_metric(*statistics, verbose=False)["frechet_inception_distance"]
    (m1, s1), (m2, s2) = Moments(d).update(x).finish(), Moments(d).update(y).finish()
    ours = frechet_distance(m1, s1, m2, s2)
    assert ours == pytest.approx(theirs, rel=1e-6)
    root = linalg.sqrtm(s1 @ s2).real
    direct = (m1 - m2) @ (m1 - m2) + np.trace(s1 + s2 - 2 * root)
    assert ours == pytest.approx(direct, rel=1e-9)


def test_a_singular_covariance_gives_a_number_and_a_warning():
    few, many = spread_rows(10, 32, 1), spread_rows(500, 32, 2)
    moments = Moments(32).update(few).finish(), Moments(32).update(many).finish()
    with pytest.warns(SingularCovarianceWarning, match="more samples than features"):
        found = frechet_distance(*moments[0], *moments[1])
    assert found > 0
    with pytest.warns(SingularCovarianceWarning):
        assert frechet_distance(*moments[1], *moments[0]) == pytest.approx(found, rel=1e-6)
    # A point mass: the distance to a Gaussian is |mu|^2 + tr(S), whatever is singular.
    zero = np.zeros((2, 2))
    with pytest.warns(SingularCovarianceWarning):
        assert frechet_distance(np.ones(2), zero, np.zeros(2), np.eye(2)) == pytest.approx(4.0)


def test_broken_features_and_too_few_are_refused():
    with pytest.raises(UserError, match="use more samples"):
        Moments(4).update(rows(1, 4, 0)).finish()
    for bad in (np.nan, np.inf):
        with pytest.raises(UserError, match="NaN or infinite"):
            frechet_distance(np.array([0.0, bad]), np.eye(2), np.zeros(2), np.eye(2))
