"""Moments and the Frechet distance against closed forms, torch-fidelity, scipy and NumPy."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.evaluation import Moments, SingularCovarianceWarning, frechet_distance
from routing.errors import UserError


def rows(n: int, d: int, seed: int = 0, offset: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=generator) * torch.linspace(0.1, 3, d) + offset


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 17), min_size=1, max_size=6), st.integers(0, 5))
def test_batches_and_merges_equal_one_pass(sizes: list[int], split: int) -> None:
    data = rows(sum(sizes), 5, seed=sum(sizes), offset=1e4)
    if len(data) < 2:
        return
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


def test_a_large_mean_does_not_eat_the_variance() -> None:
    # Sums of squares in float32 would be off by more than the variance itself here.
    data = rows(1000, 3).double() + 1e6
    moments = Moments(3)
    for part in data.split(64):
        moments.update(part)
    np.testing.assert_allclose(moments.finish()[1], np.cov(data.numpy(), rowvar=False), rtol=1e-7)


def test_wrong_rows_are_one_sentence() -> None:
    with pytest.raises(UserError, match="same feature extractor"):
        Moments(4).update(rows(3, 5))
    with pytest.raises(UserError, match="use more samples"):
        Moments(4).update(rows(1, 4)).finish()


def test_known_distances_between_gaussians() -> None:
    a, b = np.array([1.0, 4.0, 9.0]), np.array([4.0, 1.0, 0.25])
    mu = np.array([1.0, -2.0, 0.5])
    # Covariances that commute: |mu|^2 + sum (sqrt a - sqrt b)^2.
    expected = mu @ mu + ((np.sqrt(a) - np.sqrt(b)) ** 2).sum()
    found = frechet_distance(np.zeros(3), np.diag(a), mu, np.diag(b))
    assert found == pytest.approx(expected, rel=1e-13)
    rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0]
    turned = [rotation @ np.diag(v) @ rotation.T for v in (a, b)]
    assert frechet_distance(np.zeros(3), turned[0], mu, turned[1]) == pytest.approx(expected, rel=1e-12)
    # One dimension: (mean difference)^2 + (std difference)^2.
    one = frechet_distance(np.array([2.0]), np.array([[9.0]]), np.array([5.0]), np.array([[1.0]]))
    assert one == pytest.approx(9 + 4, rel=1e-14)
    # Covariances that do not commute, in 2-D: tr sqrt(M) = sqrt(tr M + 2 sqrt(det M)).
    s1, s2 = np.array([[2.0, 0.7], [0.7, 1.0]]), np.array([[1.0, -0.3], [-0.3, 3.0]])
    m = s1 @ s2
    cross = math.sqrt(np.trace(m) + 2 * math.sqrt(np.linalg.det(m)))
    closed = np.trace(s1) + np.trace(s2) - 2 * cross
    assert frechet_distance(np.zeros(2), s1, np.zeros(2), s2) == pytest.approx(closed, rel=1e-12)


@pytest.mark.parametrize("d", [3, 40])
def test_equals_torch_fidelity_and_scipy(d: int) -> None:
    from scipy import linalg
    from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric

    x, y = rows(300, d, 1).double(), rows(200, d, 2, offset=0.4).double()
    theirs = fid_statistics_to_metric(fid_features_to_statistics(x), fid_features_to_statistics(y), verbose=False)[
        "frechet_inception_distance"
    ]
    ours = frechet_distance(*Moments(d).update(x).finish(), *Moments(d).update(y).finish())
    assert ours == pytest.approx(theirs, rel=1e-6)
    (m1, s1), (m2, s2) = Moments(d).update(x).finish(), Moments(d).update(y).finish()
    root = linalg.sqrtm(s1 @ s2).real
    direct = (m1 - m2) @ (m1 - m2) + np.trace(s1 + s2 - 2 * root)
    assert ours == pytest.approx(direct, rel=1e-9)


def test_a_singular_covariance_gives_a_number_and_a_warning() -> None:
    few, many = rows(10, 32, 1), rows(500, 32, 2)
    moments = Moments(32).update(few).finish(), Moments(32).update(many).finish()
    with pytest.warns(SingularCovarianceWarning, match="more samples than features"):
        found = frechet_distance(*moments[0], *moments[1])
    assert isinstance(found, float)
    assert found > 0
    with pytest.warns(SingularCovarianceWarning):
        assert frechet_distance(*moments[1], *moments[0]) == pytest.approx(found, rel=1e-6)
    # A point mass: the distance to a Gaussian is |mu|^2 + tr(S), whatever is singular.
    zero = np.zeros((2, 2))
    with pytest.warns(SingularCovarianceWarning):
        assert frechet_distance(np.ones(2), zero, np.zeros(2), np.eye(2)) == pytest.approx(4.0)


def test_a_full_rank_covariance_gives_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = frechet_distance(np.zeros(3), np.eye(3), np.zeros(3), np.eye(3))
    assert found == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_broken_features_are_refused(bad: float) -> None:
    with pytest.raises(UserError, match="NaN or infinite"):
        frechet_distance(np.array([0.0, bad]), np.eye(2), np.zeros(2), np.eye(2))


def test_features_of_another_width_are_refused() -> None:
    with pytest.raises(UserError, match="same feature extractor"):
        frechet_distance(np.zeros(3), np.eye(3), np.zeros(2), np.eye(2))
