"""The effective guidance scale where it is known: a mixture of Gaussians and its exact denoiser."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.measurements import guidance_scale
from analysis.measurements.guidance_scale import estimates, instrumented, plain, products

LEVELS = (2.0, 4.0)


@pytest.fixture(autouse=True)
def few_replicates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guidance_scale, "REPLICATES", 200)


def mixture(level: float, n: int = 10_000, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Return clean data of four classes, the posterior means with and without the class, and noise.

    Class k has the mean m_k and the variance 1 in each of 8 dimensions.
    """
    rng = np.random.default_rng(seed)
    means = 1.5 * np.random.default_rng(9).standard_normal((4, 8))
    labels = rng.integers(0, 4, n)
    clean = means[labels] + rng.standard_normal((n, 8))
    noisy = clean + level * rng.standard_normal((n, 8))
    each = means + (noisy[:, None] - means) / (1 + level**2)
    logit = -((noisy[:, None] - means) ** 2).sum(-1) / (2 * (1 + level**2))
    weight = np.exp(logit - logit.max(1, keepdims=True))
    null = (each * (weight / weight.sum(1, keepdims=True))[..., None]).sum(1)
    return clean, each[np.arange(n), labels], null, rng.standard_normal((3, n, 8))


def both(*rows: np.ndarray) -> np.ndarray:
    """Return value, low and high of both forms, averaged over levels: (2, 3)."""
    return np.stack([estimates(form, np.stack(rows))[-1] for form in (plain, instrumented)])


@pytest.mark.parametrize("w", [1.0, 1.5, 3.0])
def test_a_calibrated_pair_has_scale_1_and_a_guided_one_its_own(w: float) -> None:
    rows = []
    for level in LEVELS:
        clean, given_, null, _ = mixture(level)
        d = given_ - null
        rows.append(products(clean, null + w * d, null, d))
    found = both(*rows)
    assert found[:, 0] == pytest.approx(w, rel=0.02)
    assert (found[:, 1] < w).all() and (found[:, 2] > w).all()
    assert (found[:, 2] - found[:, 1] < 0.08 * w).all()


def test_an_error_of_its_own_raises_the_plain_form_alone() -> None:
    rows, exact = [], []
    for level in LEVELS:
        clean, given_, null, noise = mixture(level)
        d = given_ - null
        # An independent error of 5 % of |d|^2, and an instrument with another of its own.
        error, other = noise[:2] * np.sqrt(0.05 * (d**2).mean())
        rows.append(products(clean, given_ + error, null, d + other))
        exact.append(products(clean, given_, null, d + other))
    found = both(*rows)
    assert found[:, 0] == pytest.approx([1.05, 1.0], abs=0.02)
    # Of one bootstrap the data's own noise leaves the contrast.
    contrast = estimates(plain, np.stack(rows), np.stack(exact))[-1]
    assert contrast[0] == pytest.approx(0.05, abs=0.004)
    assert contrast[2] - contrast[1] < 0.4 * (found[0, 2] - found[0, 1])


def test_two_equally_good_independent_models_have_a_plain_scale_of_2() -> None:
    rows = []
    for level in LEVELS:
        clean, given_, _, noise = mixture(level)
        # Errors a quarter as large as what no model can know.
        first, second = 0.5 * (clean - given_).std() * noise[:2]
        rows.append(products(clean, given_ + first, given_ + second))
    found = both(*rows)
    assert found[0, 0] == pytest.approx(2, abs=0.1)
    assert np.isnan(found[1]).all()


@given(st.integers(0, 2**32 - 1), st.floats(0.1, 10))
def test_the_two_ways_to_write_the_plain_form_agree(seed: int, unit: float) -> None:
    rng = np.random.default_rng(seed)
    clean, strong, weak = unit * rng.standard_normal((3, 5, 2, 3))
    sums = products(clean, strong, weak).mean(0)
    square, _, own, other, *_ = sums
    below = 1 + (other - own) / square
    if below > 1e-6:
        assert plain(sums) == pytest.approx(2 / below, rel=1e-6)
    elif below < -1e-6:
        assert np.isnan(plain(sums))


@pytest.mark.parametrize("below", [0.0, -0.2])
def test_a_denominator_that_is_not_positive_is_undefined(below: float) -> None:
    sums = np.array([[1.0, below, 1, 1, 1.0, below], [1.0, 0.5, 1, 1, 1.0, 0.5]])
    for form in (plain, instrumented):
        assert np.isnan(form(sums)[0]) and form(sums)[1] == 2
        found = estimates(form, np.repeat(sums[:, None], 9, axis=1))
        # Neither has an interval, nor has the mean over levels.
        assert np.isnan(found[[0, 2]]).all() and found[1] == pytest.approx([2, 2, 2])


def test_an_interval_in_which_the_scale_is_lost_is_open() -> None:
    rows = np.ones((1, 40, 6))
    rows[0, :, 1] = np.where(np.arange(40) % 2, 2.0, -1.9)
    value, low, high = estimates(plain, rows)[0]
    assert np.isfinite(value) and not np.isfinite([low, high]).any()
