"""The effective guidance scale of a strong over a weak prediction of clean held-out data.

For predictions D_s and D_w of x from one noisy input, and d = D_s - D_w,

    plain          w = |d|^2 / <x - D_w, d>  =  2 / (1 + (L_w - L_s) / |d|^2),   L = |x - D|^2
    instrumented   w = <d, z> / <x - D_w, z>

with sums over samples. The plain form is 1 over the step along d that minimises the error: 1 for a
calibrated pair, w for one that is guided with w over the same weak model. An error of D_s of its
own raises it: by |e|^2 / |d|^2 if it is independent, to 2 for two nets that are equally good. What
is independent of z drops out of the instrumented form (the cure for errors in variables), so z is
the conditional minus the unconditional prediction of another net, trained on its own.

A scale whose denominator is not positive is undefined: NaN. Intervals are percentiles of the
bootstrap over samples (Efron and Tibshirani 1993).
"""

from collections.abc import Callable
from typing import Any

import numpy as np

REPLICATES = 1000
Form = Callable[[np.ndarray], np.ndarray]


def products(clean: Any, strong: Any, weak: Any, direction: Any = None) -> np.ndarray:
    """Return what the scales are ratios of, per sample and as a mean over its elements.

    Args:
        clean: x, (n, ...).
        strong: D_s, like `clean`.
        weak: D_w, like `clean`.
        direction: z, like `clean`; None leaves the instrumented form undefined.

    Returns:
        (n, 6) float64: |d|^2, <x - D_w, d>, L_s, L_w, <d, z>, <x - D_w, z>.
    """
    flat = [np.asarray(v, np.float64).reshape(len(v), -1) for v in (clean, strong, weak)]
    z = np.zeros_like(flat[0]) if direction is None else np.asarray(direction, np.float64)
    z, (x, s, w) = z.reshape(len(z), -1), flat
    pairs = ((s - w, s - w), (x - w, s - w), (x - s, x - s), (x - w, x - w), (s - w, z), (x - w, z))
    return np.stack([(first * second).mean(axis=1) for first, second in pairs], axis=1)


def plain(sums: np.ndarray) -> np.ndarray:
    """Return the plain scale of sums (or means) of `products`, (..., 6) to (...)."""
    return _ratio(sums[..., 0], sums[..., 1])


def instrumented(sums: np.ndarray) -> np.ndarray:
    """Return the instrumented scale of sums (or means) of `products`, (..., 6) to (...)."""
    return _ratio(sums[..., 4], sums[..., 5])


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return np.where(below > 0, above / np.where(below > 0, below, 1), np.nan)


def estimates(form: Form, measured: np.ndarray, minus: np.ndarray | None = None) -> np.ndarray:
    """Return a scale with its 95 % interval, per noise level and for the mean over levels.

    Args:
        form: `plain` or `instrumented`.
        measured: What `products` returned per level, (levels, n, 6).
        minus: The same of another pair, for the contrast of both scales: one bootstrap draws the
            samples of both, so that what they share leaves it.

    Returns:
        (levels + 1, 3): value, low and high of each level and, last, of the mean over levels. NaN
        where undefined; an interval in which a scale becomes undefined is open (infinite).
    """
    n, rng = measured.shape[1], np.random.default_rng(0)
    found = np.empty((1 + REPLICATES, len(measured)))
    for i in range(1 + REPLICATES):
        # The first takes every sample once.
        weights = np.bincount(rng.integers(n, size=n), minlength=n) / n if i else np.full(n, 1 / n)
        found[i] = form(np.einsum("n,lnk->lk", weights, measured))
        if minus is not None:
            found[i] -= form(np.einsum("n,lnk->lk", weights, minus))
    found = np.concatenate((found, found.mean(axis=1, keepdims=True)), axis=1)
    lost = np.isnan(found[1:])
    ends = [
        np.quantile(np.where(lost, side * np.inf, found[1:]), part, axis=0, method="nearest")
        for side, part in ((-1, 0.025), (1, 0.975))
    ]
    result = np.stack((found[0], *ends), axis=1)
    result[np.isnan(found[0])] = np.nan
    return result
