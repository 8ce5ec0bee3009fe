"""Statistics over seeds: mean and spread, paired differences, ratios, Student's 95 % intervals.

Tables show mean and sample standard deviation (n - 1) over seeds. Seeds are paired (same
initialisation, data order and noise), so a difference is taken per seed first; its 95 % interval is
Student's, mean +- t(0.975, n - 1) s / sqrt(n). Ratios (speed-ups) get the same on their logarithms.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scipy.special import stdtrit

ENOUGH_SEEDS = 3


@dataclass(frozen=True)
class Estimate:
    """A mean with its spread or interval; `n` seeds. Fields without meaning at this n are None."""

    mean: float
    n: int
    std: float | None = None
    low: float | None = None
    high: float | None = None


def mean_std(values: Sequence[float]) -> Estimate | None:
    """Return mean and sample standard deviation, or None without finite values."""
    finite = [float(v) for v in values if v is not None and math.isfinite(v)]
    if not finite:
        return None
    n, mean = len(finite), math.fsum(finite) / len(finite)
    squares = math.fsum((v - mean) ** 2 for v in finite)
    return Estimate(mean, n, math.sqrt(squares / (n - 1)) if n > 1 else None)


def interval(values: Sequence[float]) -> Estimate | None:
    """Return the mean with Student's two-sided interval (None bounds below two values)."""
    estimate = mean_std(values)
    if estimate is None or estimate.std is None:
        return estimate
    half = float(stdtrit(estimate.n - 1, 0.975)) * estimate.std / math.sqrt(estimate.n)
    return replace(estimate, low=estimate.mean - half, high=estimate.mean + half)


def paired(first: Mapping[Any, float], second: Mapping[Any, float]) -> Estimate | None:
    """Return `second - first` (treatment, baseline) over the seeds both have, with its interval."""
    common = sorted(set(first) & set(second), key=str)
    return interval([second[seed] - first[seed] for seed in common])


def ratio(values: Sequence[float]) -> Estimate | None:
    """Return the geometric mean of positive ratios with the interval taken on their logarithms."""
    logs = [math.log(v) for v in values if v is not None and v > 0 and math.isfinite(v)]
    if (estimate := interval(logs)) is None:
        return None
    bounds = [None if v is None else math.exp(v) for v in (estimate.low, estimate.high)]
    return Estimate(math.exp(estimate.mean), estimate.n, None, *bounds)


def extent(counts: Iterable[float]) -> str:
    """Return numbers of seeds or steps as text, `3`, or `3-5` where they differ."""
    known = set(counts)
    return "-".join(f"{count:.0f}" for count in sorted({min(known), max(known)}))
