"""Statistics over seeds: means, paired differences and 95 % t-intervals, as frames or one by one.

Tables show the mean over seeds and, behind +-, half of the width of its 95 % interval, which is
Student's: t(0.975, n - 1) s / sqrt(n) with the sample standard deviation s (n - 1). Runs of one
seed share initialisation, data order and noise, so a difference is taken per seed first. Ratios
(speed-ups) get an interval on their logarithms.

    scores = analysis.scores("runs")
    analysis.aggregate(scores)            mean, std and interval of every variant
    analysis.paired_difference(scores)    every variant minus the dense runs, paired by seed
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import pandas as pd
from scipy.special import stdtr, stdtrit

ENOUGH_SEEDS = 3
DENSE = "dense"
# Scores are averaged over seeds within these columns.
KEYS = ("group", "variant", "metric", "step")
_STATISTICS = ("mean", "n", "std", "low", "high")


@dataclass(frozen=True)
class Estimate:
    """A mean with its spread or interval; `n` seeds. Fields without meaning at this n are None."""

    mean: float
    n: int
    std: float | None = None
    low: float | None = None
    high: float | None = None

    def text(self, form: str) -> str:
        """Return `mean [low, high]` in a number format, or the mean alone without an interval."""
        text = f"{self.mean:{form}}"
        if self.low is None or self.high is None:
            return text
        return f"{text} [{self.low:{form}}, {self.high:{form}}]"

    def half_width_text(self, form: str) -> str:
        """Return `mean \u00b1 half-width` of the interval, or the mean alone without one."""
        text = f"{self.mean:{form}}"
        if self.low is None:
            return text
        return f"{text} \u00b1 {self.mean - self.low:{form.lstrip('+')}}"


def mean_std(values: Iterable[float | None]) -> Estimate | None:
    """Return mean and sample standard deviation, or None without finite values."""
    finite = []
    for value in values:
        if value is not None and math.isfinite(value):
            finite.append(float(value))
    if not finite:
        return None
    n, mean = len(finite), math.fsum(finite) / len(finite)
    if n == 1:
        return Estimate(mean, n)
    squares = math.fsum((value - mean) ** 2 for value in finite)
    return Estimate(mean, n, math.sqrt(squares / (n - 1)))


def half_width(std: float, n: int) -> float:
    """Return half of the width of Student's two-sided 95 % interval of a mean of `n` values."""
    return float(stdtrit(n - 1, 0.975)) * std / math.sqrt(n)


def interval(values: Iterable[float | None]) -> Estimate | None:
    """Return the mean with Student's two-sided interval (None bounds below two values)."""
    estimate = mean_std(values)
    if estimate is None or estimate.std is None:
        return estimate
    half = half_width(estimate.std, estimate.n)
    return replace(estimate, low=estimate.mean - half, high=estimate.mean + half)


def paired(baseline: Mapping[Any, float], variant: Mapping[Any, float]) -> Estimate | None:
    """Return `variant - baseline` over the seeds that both have, with its interval."""
    common = sorted(set(baseline) & set(variant), key=str)
    return interval([variant[seed] - baseline[seed] for seed in common])


def ratio(values: Iterable[float | None]) -> Estimate | None:
    """Return the geometric mean of positive ratios with the interval taken on their logarithms."""
    logarithms = []
    for value in values:
        if value is not None and value > 0 and math.isfinite(value):
            logarithms.append(math.log(value))
    estimate = interval(logarithms)
    if estimate is None:
        return None
    mean = math.exp(estimate.mean)
    if estimate.low is None or estimate.high is None:
        return Estimate(mean, estimate.n)
    return Estimate(mean, estimate.n, None, math.exp(estimate.low), math.exp(estimate.high))


def two_sided_p(estimate: Estimate) -> float:
    """Return the p of a t-test of the mean against 0."""
    assert estimate.std is not None
    if estimate.std == 0:
        return float(estimate.mean == 0)
    t = estimate.mean / (estimate.std / math.sqrt(estimate.n))
    return float(2 * stdtr(estimate.n - 1, -abs(t)))


def p_text(p: float) -> str:
    """Return a p-value with three decimals, `< 0.001` below."""
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


def holm(p_values: Mapping[int, float]) -> dict[int, float]:
    """Return Holm's adjusted p-values (Holm 1979)."""
    adjusted, largest = {}, 0.0
    ordered = sorted(p_values.items(), key=lambda item: item[1])
    for rank, (key, p) in enumerate(ordered):
        largest = max(largest, min(1.0, p * (len(ordered) - rank)))
        adjusted[key] = largest
    return adjusted


def number_range(counts: Iterable[float]) -> str:
    """Return numbers of seeds or steps as text, `3`, or `3-5` where they differ."""
    distinct = set(counts)
    return "-".join(f"{count:.0f}" for count in sorted({min(distinct), max(distinct)}))


# --- frames ---------------------------------------------------------------------------------------


def one_per_seed(scores: pd.DataFrame) -> pd.DataFrame:
    """Return the runs' own scores, one per group, variant, metric, step and seed.

    Args:
        scores: What `analysis.scores` returned.

    Of several runs of one seed the one that was trained longest counts. Scores that were measured
    later under another guidance, sampler or reference are left out (`own` is false).
    """
    points = scores[scores["own"].astype(bool)].dropna(subset=["step", "value", "seed"])
    points = points.drop_duplicates(["path", "metric", "step"], keep="last")
    points = points.sort_values("last_step", kind="stable")
    return points.drop_duplicates([*KEYS, "seed"], keep="last")


def aggregate(scores: pd.DataFrame, by: Sequence[str] = KEYS) -> pd.DataFrame:
    """Return mean, standard deviation and 95 % interval over seeds.

    Args:
        scores: What `analysis.scores` returned.
        by: Columns whose values are not averaged over.

    Returns:
        One row per combination of `by`: those columns, `mean`, `std` (sample standard deviation),
        `low` and `high` (ends of the 95 % t-interval of the mean) and `n` (seeds).
    """
    return estimates(one_per_seed(scores), by, "value")


def paired_difference(scores: pd.DataFrame, baseline: str = DENSE) -> pd.DataFrame:
    """Return every variant's difference to a baseline, paired by seed and step.

    Args:
        scores: What `analysis.scores` returned.
        baseline: Variant to compare with.

    Returns:
        One row per group, variant, metric and step that both were scored at: those columns, `mean`
        (of variant minus baseline), `std`, `low` and `high` (ends of the 95 % t-interval) and `n`
        (pairs of seeds).
    """
    points = one_per_seed(scores)[[*KEYS, "seed", "value"]]
    is_baseline = points["variant"] == baseline
    reference = points[is_baseline].drop(columns="variant").rename(columns={"value": "baseline"})
    pairs = points[~is_baseline].merge(reference, on=["group", "metric", "step", "seed"])
    pairs["difference"] = pairs["value"] - pairs["baseline"]
    return estimates(pairs, KEYS, "difference")


def estimates(frame: pd.DataFrame, by: Sequence[str], column: str) -> pd.DataFrame:
    """Return mean, std, low, high and n of a column for every combination of `by`."""
    rows = []
    for key, values in frame.groupby(list(by), sort=False)[column]:
        estimate = interval(values)
        if estimate is not None:
            rows.append((*key, *astuple(estimate)))
    result = pd.DataFrame(rows, columns=[*by, *_STATISTICS])
    bounds = {name: "float64" for name in ("mean", "std", "low", "high")}
    return result.astype({**bounds, "n": "int64"})[[*by, "mean", "std", "low", "high", "n"]]
