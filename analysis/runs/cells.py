"""A table's cell: the runs of one base under one treatment, and the steps they are read after.

Steps are no part of a run's identity: grids that share a folder leave runs of unequal length side
by side, and a run that went on has scores on the way. Scores are compared after equal steps alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from analysis.runs.statistics import Estimate, mean_std
from backbones.sizes import parse_size

Scored = dict[tuple[str, float], dict[int, float]]


@dataclass(frozen=True)
class Cell:
    """The runs of one base under one treatment, read after one number of steps.

    Attributes:
        base: Key of the base.
        treatment: How tokens were routed.
        runs: Its finished runs.
        scored: Scores by `(column, step)` and seed, those on the way to a run's end included.
        steps: Steps after which its scores are read, so that differences pair seed and step.
        score: Column of the base's metric.
    """

    base: str
    treatment: str
    runs: pd.DataFrame = field(repr=False, compare=False)
    scored: Scored = field(repr=False, compare=False)
    score: str = field(compare=False)
    steps: float = field(default=float("nan"), compare=False)

    def first(self, column: str, default: Any = None) -> Any:
        """Return the first known value of a column."""
        if column not in self.runs:
            return default
        known = self.runs[column].dropna()
        return known.iloc[0] if len(known) else default

    def by_seed(self, column: str, steps: float | None = None) -> dict[int, float]:
        """Return seed to value after `steps` (the cell's own by default), no value missing.

        What a run took, unlike its scores, is known of its end alone: where no run ended there, a
        column that training longer leaves alone (all but `wall_s`) is read of the longest runs.
        """
        steps = self.steps if steps is None else steps
        if column.startswith("score."):
            return dict(self.scored.get((column, steps), {}))
        if column not in self.runs:
            return {}
        known = self.runs.dropna(subset=["seed", column]).sort_values("step", kind="stable")
        ended = known[known["step"] == steps]
        known = ended if len(ended) or column == "wall_s" else known
        return dict(zip(known["seed"].map(int), known[column].map(float), strict=True))

    def at(self, steps: float) -> Cell:
        """Return the cell read after other steps; itself where nothing was scored there."""
        return dataclasses.replace(self, steps=steps) if self.by_seed(self.score, steps) else self

    @functools.cached_property
    def _longest(self) -> pd.Series:
        return self.runs.groupby("seed")["step"].max().dropna()

    @property
    def ends(self) -> set[float]:
        """The numbers of steps after which its runs ended."""
        return {float(step) for step in self.runs["step"].dropna()}

    @property
    def usual(self) -> float:
        """The number of steps that most seeds took, of two as frequent the larger; nan: unknown."""
        return float(self._longest.mode().max()) if len(self._longest) else float("nan")

    @property
    def odd_steps(self) -> list[int]:
        """The numbers of steps of the seeds without a score after `steps`."""
        known = self.by_seed(self.score)
        return sorted({int(step) for seed, step in self._longest.items() if seed not in known})

    def estimate(self, column: str) -> Estimate | None:
        """Return mean, standard deviation and n over seeds of a column."""
        return mean_std(list(self.by_seed(column).values()))

    @property
    def machines(self) -> frozenset[str]:
        """The devices that its runs name; those of older runs name none."""
        return frozenset(self.runs["device"].dropna()) if "device" in self.runs else frozenset()

    @property
    def depth(self) -> int:
        """Number of blocks."""
        depth = self.first("config.backbone.depth")
        return int(depth) if depth is not None else parse_size(str(self.first("size"))).depth


def on_the_way(scores: pd.DataFrame | None) -> dict[str, list[tuple[str, float, float]]]:
    """Return every run's own scores: column, step, value."""
    found: dict[str, list[tuple[str, float, float]]] = {}
    if scores is not None and "own" in scores:
        own = scores[scores["own"].astype(bool)].dropna(subset=["step", "value"])
        names = (own[name] for name in ("run", "metric", "step", "value"))
        for run, name, step, value in zip(*names, strict=True):
            found.setdefault(str(run), []).append((f"score.{name}", float(step), float(value)))
    return found


def scored(runs: pd.DataFrame, ways: Mapping[str, list[tuple[str, float, float]]]) -> Scored:
    """Return a cell's scores by column, steps and seed, from its runs and from `on_the_way`."""
    found: Scored = {}
    columns = [str(column) for column in runs if str(column).startswith("score.")]
    for row in runs.dropna(subset=["seed"]).sort_values("step", kind="stable").to_dict("records"):
        ended = [(c, float(row["step"]), float(row[c])) for c in columns if not pd.isna(row[c])]
        for column, step, value in [*ended, *ways.get(str(row["run"]), [])]:
            found.setdefault((column, step), {})[int(row["seed"])] = value
    return found


def read_at(cell: Cell, others: Sequence[Cell], ends: Iterable[float]) -> Cell:
    """Return a cell read after the steps (of `ends`) with the most seeds to pair with the others.

    Where none of them pairs: after the others' steps, else after those that most of its seeds took.
    """
    for steps in (ends, {end for other in others for end in other.ends}):
        pairs = {
            step: sum(
                len(cell.by_seed(cell.score, step).keys() & other.by_seed(cell.score, step).keys())
                for other in others
            )
            for step in steps
        }
        best = max(pairs, key=lambda step: (pairs[step], step), default=0.0)
        if pairs.get(best):
            return dataclasses.replace(cell, steps=best)
    return dataclasses.replace(cell, steps=cell.usual)
