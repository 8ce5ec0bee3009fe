"""Groups of comparable runs: a baseline and routed variants, each read after some steps.

The number of steps is no part of a run's identity: grids that share a folder leave runs of unequal
length side by side, and a run that was trained further has scores on the way. Scores are compared
after equal steps only.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from analysis.comparison.aggregation import DENSE, Estimate, mean_std
from analysis.runs.grouping import USUAL_OPTIONS
from backbones.sizes import parse_size

# What a metric's name means: key (its kind), better, features, n.
Metrics = dict[str, dict[str, Any]]
# Seed to value, by metric and step.
Values = dict[tuple[str, float], dict[int, float]]
# Step, macs and value of the runs' own scores, grouped by path and metric.
Histories = Any


@dataclass(frozen=True, eq=False)
class Variant:
    """Runs of one group that routed their tokens alike, read after one number of steps."""

    name: str  # how tokens were routed
    runs: pd.DataFrame = field(repr=False)  # its rows of `analysis.load`
    metric: str  # of its group
    values: Values = field(repr=False)  # every own score of these runs
    histories: Histories = field(repr=False)  # of all runs
    step: float = float("nan")

    def first(self, column: str, default: Any = None) -> Any:
        """Return the first known value of a column of its runs."""
        for value in self.runs[column].tolist() if column in self.runs else ():
            if not pd.isna(value):
                return value
        return default

    def history(self, path: str) -> pd.DataFrame | None:
        """Return step, macs and value of one run's scores by the group's metric; None without."""
        key = path, self.metric
        return self.histories.get_group(key) if key in self.histories.indices else None

    def by_seed(self, metric: str | None = None, step: float | None = None) -> dict[int, float]:
        """Return seed to score after `step` steps (by default its own metric and step)."""
        metric = self.metric if metric is None else metric
        key = metric, self.step if step is None else step
        return self.values.get(key, {})

    def estimate(self, metric: str | None = None) -> Estimate | None:
        """Return mean, standard deviation and n over seeds of a metric."""
        return mean_std(self.by_seed(metric).values())

    def cost(self, column: str) -> float | None:
        """Return the mean over seeds of a cost column such as `macs_routed`, of the longest runs.

        Costs of a forward pass do not depend on the number of steps.
        """
        if column not in self.runs:
            return None
        known = self.runs.dropna(subset=["seed", column]).sort_values("step", kind="stable")
        costs = known.drop_duplicates("seed", keep="last")[column]
        return float(costs.mean()) if len(costs) else None

    @functools.cached_property
    def curves(self) -> dict[int, pd.DataFrame]:
        """Every seed's scores by the group's metric: step, macs, value.

        Of runs of one seed the one that was scored most often counts, of those the longest; a seed
        without a score after the variant's step is left out, as in tables.
        """
        scored = self.by_seed()
        best: dict[int, pd.DataFrame] = {}
        for seed, path in self.runs[["seed", "path"]].dropna().itertuples(index=False):
            curve = self.history(path)
            if curve is None or seed not in scored:
                continue
            if seed not in best or _length(curve) > _length(best[seed]):
                best[seed] = curve
        return {seed: best[seed] for seed in scored if seed in best}

    def at(self, step: float) -> Variant:
        """Return the variant read after other steps; itself where nothing was scored there."""
        return replace(self, step=step) if self.by_seed(step=step) else self

    def paired_with(self, others: Sequence[Variant], steps: Iterable[float]) -> Variant:
        """Return the variant after the one of `steps` at which most seeds pair with the others.

        Where none of these pairs: after the others' steps, else after those that most seeds took.
        """
        their_ends = set[float]().union(*(variant.ends for variant in others))
        for candidates in (steps, their_ends):
            counts = {step: self._pairs(others, step) for step in candidates}
            best = max(counts, key=lambda step: (counts[step], step), default=None)
            if best is not None and counts[best]:
                return replace(self, step=best)
        counts = Counter(self._last_steps.values())
        # On a tie the larger.
        most_frequent = max(counts, key=lambda step: (counts[step], step), default=float("nan"))
        return replace(self, step=most_frequent)

    def _pairs(self, others: Sequence[Variant], step: float) -> int:
        seeds = self.by_seed(step=step).keys()
        return sum(len(seeds & variant.by_seed(step=step).keys()) for variant in others)

    @functools.cached_property
    def _last_steps(self) -> dict[int, float]:
        """Steps of the longest run, by seed."""
        steps = self.runs.dropna(subset=["seed", "step"]).groupby("seed")["step"].max()
        return dict(zip(map(int, steps.index), map(float, steps), strict=True))

    @functools.cached_property
    def ends(self) -> set[float]:
        """The numbers of steps after which its runs ended."""
        return set(map(float, self.runs["step"].dropna()))

    @property
    def other_steps(self) -> list[int]:
        """The numbers of steps of the seeds without a score after `step`."""
        missing = self._last_steps.keys() - self.by_seed().keys()
        return sorted({int(self._last_steps[seed]) for seed in missing})

    @property
    def macs_share(self) -> float | None:
        """Multiply-adds of a routed step over those of a dense one."""
        dense, routed = self.first("macs_dense"), self.first("macs_routed")
        return routed / dense if dense and routed else None

    @property
    def depth(self) -> int:
        """Number of blocks."""
        depth = self.first("config.backbone.depth")
        return int(depth) if depth is not None else parse_size(str(self.first("size"))).depth

    def is_usual(self, *except_for: str) -> bool:
        """Whether it has one route throughout and, apart from those named, usual options."""
        if "/" in str(self.first("route")):
            return False
        for key, value in USUAL_OPTIONS.items():
            if key not in except_for and str(self.first(f"config.routing.{key}", value)) != value:
                return False
        return True


def _length(curve: pd.DataFrame) -> tuple[int, float]:
    return len(curve), curve["step"].iloc[-1]


@dataclass(frozen=True)
class Group:
    """Comparable runs: the baseline (dense runs), the routed variants and the metric to compare."""

    label: str
    shared_config: str  # what is equal apart from the backbone
    metric: str
    known_metrics: Metrics  # of all runs
    baseline: Variant | None
    routed: tuple[Variant, ...]

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The baseline first, then the routed variants."""
        return (self.baseline, *self.routed) if self.baseline else self.routed

    @property
    def better(self) -> str:
        """The better end of its metric."""
        return self.known_metrics[self.metric].get("better") or "lower"

    def first(self, column: str, default: Any = None) -> Any:
        """Return a value that all its runs share, from its first variant."""
        return self.variants[0].first(column, default)

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return self.variants[0].depth

    @property
    def backbone(self) -> str:
        """Name of the backbone."""
        return str(self.first("backbone"))

    @property
    def model(self) -> str:
        """Backbone and size."""
        return f"{self.backbone}-{self.first('size')}"

    def count(self, metric: str) -> int:
        """Return how many scores its variants have by a metric, over seeds."""
        return sum(len(variant.by_seed(metric)) for variant in self.variants)

    @functools.cached_property
    def metrics(self) -> Metrics:
        """The metrics of its scores, its own first, then those in the same features.

        Of those that count samples, the ones of as many as its own.
        """
        reference = self.known_metrics[self.metric]
        same_features: list[str] = []
        remaining: list[str] = []
        for name, metric in self.known_metrics.items():
            comparable = metric.get("features") is None or metric.get("n") == reference.get("n")
            if name != self.metric and comparable and self.count(name):
                same = metric.get("features") == reference.get("features")
                (same_features if same else remaining).append(name)
        names = [self.metric, *same_features, *remaining]
        return {name: self.known_metrics[name] for name in names}

    def metric_of_kind(self, kind: str) -> str | None:
        """Return the metric of a kind (`fd`, `recall`), in its own features where possible."""
        for name, metric in self.metrics.items():
            if metric.get("key") == kind:
                return name
        return None

    @functools.cached_property
    def nn_ratio(self) -> str | None:
        """The metric of its NN-distance ratio (stored as `memorisation`), or None.

        In the features of its own score before pixels, then of as many samples.
        """
        reference = self.known_metrics[self.metric]
        ranks = {}
        for name, metric in self.known_metrics.items():
            in_features = metric.get("key") == "memorisation"
            if not in_features and metric.get("key") != "memorisation_pixels":
                continue
            if in_features and metric.get("features") != reference.get("features"):
                continue
            count = self.count(name)
            if count:
                ranks[name] = (in_features, metric.get("n") == reference.get("n"), count)
        return max(ranks, key=ranks.__getitem__, default=None)

    @functools.cached_property
    def tread(self) -> list[Variant]:
        """The variants of TREAD itself, with the usual options."""
        return [v for v in self.routed if v.first("method") == "TREAD" and v.is_usual()]

    def guideline(self) -> Variant | None:
        """Return the paper's guideline (2 to depth-4 at 0.5), else the most replicated route."""
        span = f"2-{self.depth - 4}"
        for variant in self.tread:
            if variant.first("span") == span and variant.first("rate") == 0.5:
                return variant
        return max(self.tread, key=lambda variant: len(variant.by_seed()), default=None)

    def pair(self) -> tuple[Variant | None, Variant | None]:
        """Return the baseline and the guideline's variant, after the same steps if possible."""
        routed = self.guideline()
        if self.baseline is None or routed is None:
            return self.baseline, routed
        return self.baseline.at(routed.step), routed

    @property
    def evidence(self) -> int:
        """The number of scores, by metric and seed, that baseline and guideline share."""
        baseline, routed = self.pair()
        if baseline is None or routed is None:
            return 0
        return sum(len(baseline.by_seed(m).keys() & routed.by_seed(m)) for m in self.metrics)


def variant_order(variant: Variant) -> tuple[Any, ...]:
    """Sort key: dense first, TREAD before other methods, then by the blocks of the route."""
    method = str(variant.first("method"))
    blocks = []
    for number in str(variant.first("span")).replace("+", "-").split("-"):
        if number.isdigit():
            blocks.append(int(number))
    rate = variant.first("rate", 2.0)  # a route with several rates stands after those with one
    return method != DENSE, method != "TREAD", method, len(blocks), blocks, rate, variant.name
