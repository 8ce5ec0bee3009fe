"""Loaded runs and their scores, sorted into groups of comparable variants.

`Results` holds the two frames that tables and figures are made from. `analysis.runs.grouping`
labels their rows with group and variant; from these labels `Results.groups` makes the objects of
`groups`: a baseline (the dense runs) and routed variants.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.comparison import aggregation
from analysis.comparison.aggregation import DENSE
from analysis.comparison.groups import Group, Histories, Metrics, Values, Variant, variant_order
from analysis.errors import AnalysisError, pick
from analysis.runs import filters, loading
from analysis.runs.archives import unpacked
from analysis.runs.grouping import assign_groups
from analysis.runs.loss_csv import curves_of_csv
from experiments.runtime.console import show

# Columns of a score that tables need.
_NARROW = (
    "path", "group", "variant", "seed", "last_step", "metric", "key", "value", "step", "macs",
    "better", "features", "n", "own", "final",
)  # fmt: skip
# Columns of a run that are joined to its scores; those of its configuration are not needed.
_BESIDE_SCORES = ("run", "path", "backbone", "route", "group", "variant", "seed", "step")


@dataclass(frozen=True, eq=False)
class Results:
    """Loaded runs with their scores, and the metric to compare by (None: each group's own FD)."""

    runs: pd.DataFrame  # as of `analysis.load`
    scores: pd.DataFrame  # as of `analysis.scores`, narrowed to what tables need
    metric: str | None = None
    problems: pd.DataFrame = field(default_factory=pd.DataFrame)
    folder: Path | None = None  # that was read; benchmarks lie there, also where no run does
    every_group: bool = False  # also groups without both dense and routed runs in the main table
    curves: pd.DataFrame | None = None  # of a CSV file of loss curves, in place of runs

    @classmethod
    def of(cls, source: Any, metric: str | None = None) -> Results:
        """Return the results of a folder or archive, of a frame of runs or scores, or of results.

        `AnalysisError` if the folder is none, or a frame lacks what identifies a run.
        """
        if isinstance(source, Results):
            return source if metric in (None, source.metric) else replace(source, metric=metric)
        if not isinstance(source, pd.DataFrame):
            path = unpacked(Path(source))
            folder = loading.read_folder(path)
            scores = _scores(folder.runs)
            return cls(folder.runs, scores, metric, folder.problems, folder=path)
        frame = loading.runs_of(source)
        if "metric" not in frame:
            runs = assign_groups(frame.reset_index(drop=True))
            return cls(runs, _scores(runs), metric)
        columns = [name for name in frame if name not in loading.SCORE]
        run_names = {renamed: name for name, renamed in loading.RENAMED.items()}
        runs = frame[columns].drop_duplicates("path").rename(columns=run_names)
        runs = assign_groups(runs.reset_index(drop=True))
        labels = runs.set_index("path")[["group", "variant"]]
        scores = frame.drop(columns=["group", "variant"], errors="ignore")
        return cls(runs, scores.join(labels, on="path"), metric)

    @property
    def roots(self) -> list[Path]:
        """The folders that the runs were loaded from."""
        if self.folder is not None:
            return [self.folder]
        return [Path(root) for root in self.runs["root"].unique()] if "root" in self.runs else []

    @functools.cached_property
    def metrics(self) -> Metrics:
        """What each metric's name means: key, better, features, n."""
        ends = self.own_scores[self.own_scores["final"].astype(bool) | self._is_scale]
        table: Metrics = {}
        for row in ends.drop_duplicates("metric").to_dict("records"):
            meaning = {}
            for key in ("key", "better", "features", "n"):
                meaning[key] = None if pd.isna(row[key]) else row[key]
            table[row["metric"]] = meaning
        return table

    @functools.cached_property
    def final_metrics(self) -> list[str]:
        """The metrics that some run has at its end."""
        scores = self.own_scores
        at_end = self._is_scale & (scores["step"] == scores["last_step"])
        at_end |= scores["final"].astype(bool)
        names = set(scores.loc[at_end, "metric"])
        return list(filter(names.__contains__, self.metrics))

    @functools.cached_property
    def own_scores(self) -> pd.DataFrame:
        """The runs' own scores, in the columns that tables need."""
        return self.scores.loc[self.scores["own"].astype(bool), list(_NARROW)]

    @property
    def _is_scale(self) -> pd.Series:
        return self.own_scores["key"].fillna("").str.startswith("w_eff")

    @functools.cached_property
    def groups(self) -> list[Group]:
        """The groups, those with the most evidence first."""
        if self.metric is not None:
            self._check_metric(self.metric)
        values, histories = self._values(), self._histories()
        groups = []
        for label, runs in self.runs.groupby("group", sort=False):
            metric = self._metric_of(str(label))
            if metric is not None:
                groups.append(self._group(str(label), runs, metric, values, histories))
        # The configuration with the most evidence leads, with all of its backbones.
        evidence: Counter[str] = Counter()
        for group in groups:
            evidence[group.shared_config] += group.evidence
        return sorted(groups, key=lambda group: (-evidence[group.shared_config], group.label))

    def _check_metric(self, name: str) -> None:
        """Raise `AnalysisError` if no score has that full name."""
        of_kind = [full for full, meaning in self.metrics.items() if meaning["key"] == name]
        if name not in self.metrics and of_kind:
            raise AnalysisError(
                f"--metric {name}: expected the full name of a score: {', '.join(of_kind)}"
            )
        pick("score", name, self.metrics)

    def _metric_of(self, group: str) -> str | None:
        """Return the metric that a group is read by: that which most runs have, FDs before others.

        None where no run of the group has it.
        """
        scores = self.own_scores[self.own_scores["group"] == group]
        at_end = scores["final"].astype(bool) | (scores["step"] == scores["last_step"])
        runs_scored = scores[at_end].groupby("metric")["path"].nunique()
        ranks = {}
        for name, metric in self.metrics.items():
            if name in runs_scored:
                ranks[name] = (metric.get("key") == "fd", runs_scored[name])
        if self.metric is not None:
            return self.metric if self.metric in ranks else None
        return max(ranks, key=ranks.__getitem__, default=None)

    def _group(
        self,
        label: str,
        runs: pd.DataFrame,
        metric: str,
        values: dict[tuple[str, str], Values],
        histories: Histories,
    ) -> Group:
        variants = []
        for name, runs_of_variant in runs.groupby("variant", sort=False):
            scores = values.get((label, str(name)), {})
            variants.append(Variant(str(name), runs_of_variant, metric, scores, histories))
        variants.sort(key=variant_order)
        baseline = next((v for v in variants if v.first("method") == DENSE), None)
        baselines = [baseline] if baseline else []
        routed = []
        for variant in variants:
            if variant is not baseline:
                routed.append(variant.paired_with(baselines, variant.ends))
        if baseline is not None:
            steps = baseline.ends.union(*(variant.ends for variant in routed))
            baseline = baseline.paired_with(routed, steps)
        shared_config = str(variants[0].first("shared_config"))
        return Group(label, shared_config, metric, self.metrics, baseline, tuple(routed))

    def _values(self) -> dict[tuple[str, str], Values]:
        """Return the own scores by group and variant, metric and step, and seed."""
        table: dict[tuple[str, str], Values] = {}
        points = aggregation.one_per_seed(self.own_scores)
        columns = ["group", "variant", "metric", "step", "seed", "value"]
        for group, variant, metric, step, seed, value in points[columns].itertuples(index=False):
            values = table.setdefault((group, variant), {})
            values.setdefault((metric, float(step)), {})[int(seed)] = float(value)
        return table

    def _histories(self) -> Histories:
        """Return the own scores, in the order of steps, grouped by folder and metric."""
        scores = self.own_scores.dropna(subset=["step", "value"])
        scores = scores.sort_values("step", kind="stable").astype({"step": "float64"})
        scores = scores.drop_duplicates(["path", "metric", "step"], keep="last")
        return scores.groupby(["path", "metric"])[["step", "macs", "value"]]

    def pairs(self) -> Iterator[tuple[Group, Variant, Variant]]:
        """Yield every group that has both, with its baseline and the guideline's variant."""
        for group in self.groups:
            baseline, routed = group.pair()
            if baseline is not None and routed is not None:
                yield group, baseline, routed


def _scores(runs: pd.DataFrame) -> pd.DataFrame:
    return loading.scores(runs[runs.columns.intersection(list(_BESIDE_SCORES))])


Source = Results | pd.DataFrame | str | os.PathLike[str]


def results_for_command(
    options: argparse.Namespace, kind: str = "", names: Collection[str] = ()
) -> Results:
    """Return the results that a command line asks for; say on stderr what is left out.

    Args:
        options: The parsed command line.
        kind: What `--only` selects: table or figure.
        names: Names that `--only` takes; they are checked before any run is read.
    """
    for name in getattr(options, "only", None) or ():
        pick(kind, name, dict.fromkeys(names))
    if options.runs.suffix == ".csv":
        return _results_of_csv(options)
    words = filters.parse_arguments(options.filters)
    try:
        folder = loading.read_folder(options.runs, words)
    except filters.UnknownGrid as error:
        if words["grid"] in names:
            raise AnalysisError(f"{error}; did you mean --only {words['grid']}?") from None
        raise
    runs = folder.runs
    every_group = options.all or "grid" in words
    trials = filters.exploratory(runs)
    if trials.any() and not every_group:
        runs = assign_groups(runs[~trials].reset_index(drop=True))
        show(
            f"left out: {trials.sum()} runs of searches and learning-rate sweeps (--all or the "
            "name of their grid shows them)",
            stream=sys.stderr,
        )
    if words and runs.empty:
        asked = " ".join(options.filters)
        raise AnalysisError(f"no finished run below {options.runs} meets {asked}")
    scores = _scores(runs)
    results = Results(runs, scores, options.metric, folder.problems, every_group=every_group)
    unfinished = 0
    for row in results.problems.to_dict("records"):
        if row["status"] == "damaged":
            show(f"damaged: {row['run']}: {row['reason']}", stream=sys.stderr)
        else:
            unfinished += 1
    if unfinished:
        show(
            f"unfinished: {unfinished} (python -m analysis list {options.runs})", stream=sys.stderr
        )
    return results


def _results_of_csv(options: argparse.Namespace) -> Results:
    """Return results that hold the loss curves of another trainer's CSV file."""
    if getattr(options, "only", None) != ["equal_macs"] or options.filters:
        raise AnalysisError(
            f"{options.runs}: a CSV file gives a table or figure: expected --only equal_macs"
        )
    curves = curves_of_csv(options.runs)
    return Results(pd.DataFrame(), pd.DataFrame(), folder=options.runs.parent, curves=curves)
