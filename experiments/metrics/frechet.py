"""Frechet distance between two Gaussians (no torch here).

    FD = |mu_1 - mu_2|^2 + tr(S_1) + tr(S_2) - 2 tr((S_1 S_2)^(1/2))        Dowson and Landau 1982;
    Heusel et al. 2017

The last trace is the sum of the square roots of the eigenvalues of `S_1^(1/2) S_2 S_1^(1/2)`, which
is symmetric and has the eigenvalues of `S_1 S_2`. Two symmetric eigenproblems are four times as
fast as a general matrix square root at 2048 features, and cannot leave the real numbers.
"""

from __future__ import annotations

import warnings

import numpy as np

from routing.errors import UserError


class SingularCovarianceWarning(UserWarning):
    """A covariance has no full rank: usually fewer samples than features."""


def frechet_distance(
    mu1: np.ndarray, sigma1: np.ndarray, mu2: np.ndarray, sigma2: np.ndarray, warn: bool = True
) -> float:
    """Return the squared Frechet distance of `N(mu1, sigma1)` and `N(mu2, sigma2)`.

    Args:
        mu1: Mean, with shape `(d,)`.
        sigma1: Covariance, with shape `(d, d)`.
        mu2: Mean, with shape `(d,)`.
        sigma2: Covariance, with shape `(d, d)`.
        warn: Say when a covariance is singular; the distance is then still that of the two
            Gaussians, but as an estimate from few samples it is biased upwards.

    Raises:
        UserError: Shapes differ, or a number is not finite.
    """
    arrays = [np.asarray(a, dtype=np.float64) for a in (mu1, sigma1, mu2, sigma2)]
    mu1, sigma1, mu2, sigma2 = arrays
    d = mu1.size
    if mu1.shape != (d,) or mu2.shape != (d,) or sigma1.shape != (d, d) or sigma2.shape != (d, d):
        raise UserError(
            f"moments of {mu1.size} and {mu2.size} features cannot be compared; "
            "both must come from the same feature extractor"
        )
    if not all(np.isfinite(a).all() for a in arrays):
        raise UserError(
            "the features hold NaN or infinite numbers; the samples or the reference are broken"
        )
    values, vectors = np.linalg.eigh((sigma1 + sigma1.T) / 2)
    others = np.linalg.eigvalsh((sigma2 + sigma2.T) / 2)
    if warn:
        _warn_if_singular(values, others)
    root = (vectors * np.sqrt(_clean(values))) @ vectors.T
    product = root @ sigma2 @ root
    cross = np.sqrt(_clean(np.linalg.eigvalsh((product + product.T) / 2))).sum()
    shift = mu1 - mu2
    distance = float(shift @ shift + np.trace(sigma1) + np.trace(sigma2) - 2 * cross)
    # Rounding may leave a hair below zero between equal Gaussians; a squared distance has no sign.
    return max(distance, 0.0)


def _noise_floor(values: np.ndarray) -> float:
    return len(values) * np.finfo(np.float64).eps * max(float(values.max(initial=0.0)), 0.0)


def _clean(values: np.ndarray) -> np.ndarray:
    """Set eigenvalues that are rounding noise to zero: their square roots would not be small."""
    return np.where(values > _noise_floor(values), values, 0.0)


def _warn_if_singular(*spectra: np.ndarray) -> None:
    ranks = [int((values > _noise_floor(values)).sum()) for values in spectra]
    d = len(spectra[0])
    if min(ranks) < d:
        warnings.warn(
            f"covariances of rank {ranks[0]} and {ranks[1]} in {d} features are singular: "
            "the Frechet distance is biased; use more samples than features",
            SingularCovarianceWarning,
            stacklevel=3,
        )
