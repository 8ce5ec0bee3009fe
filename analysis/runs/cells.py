"""Runs of one setting and route at one number of steps (a cell), and what a cell is held against.

A cell is the runs of one base under one treatment, and the steps they are read after. Steps are no
part of a run's identity: grids that share a folder leave runs of unequal length side by side, and a
run that went on has scores on the way. Scores are compared after equal steps alone.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.runs.grouping import USUAL_OPTIONS, named
from analysis.runs.run_records import Metrics, check_attrs, load, pick, scores
from analysis.runs.seed_statistics import Estimate, mean_std
from backbones.sizes import parse_size

_PATH = ["step", "macs", "value"]
# Columns of a run that are averaged over seeds and do not depend on the number of steps.
_OF_ANY_LENGTH = (
    "macs_dense",
    "macs_routed",
    "macs_dense_no_attention",
    "macs_routed_no_attention",
)
Paths = Mapping[str, Mapping[Any, pd.DataFrame]]  # step, macs, value by run and metric


@dataclass(frozen=True, eq=False)
class Cell:
    """The runs of one base under one treatment, read after one number of steps."""

    treatment: str  # how tokens were routed
    runs: pd.DataFrame = field(repr=False)  # finished ones
    # By `(column, step)` and seed: scores, those on the way to a run's end included, and costs.
    scored: dict[tuple[str, float], dict[int, float]] = field(repr=False)
    ways: Paths = field(repr=False)  # of all runs
    score: str  # column of the base's metric
    # Scores are read after these, so that differences pair seed and step.
    steps: float = float("nan")

    def first(self, column: str, default: Any = None) -> Any:
        """Return the first known value of a column."""
        known = self.runs[column].dropna() if column in self.runs else ()
        return next(iter(known), default)

    def by_seed(self, column: str, steps: float | None = None) -> dict[int, float]:
        """Return seed to value after `steps` (the cell's own by default), no value missing.

        What a run took, unlike its scores, is known of its end alone: where no run ended there, a
        column that training longer leaves alone is read of the longest runs.
        """
        known = self.scored.get((column, self.steps if steps is None else steps), {})
        if known or column not in _OF_ANY_LENGTH:
            return known
        every = (self.scored.get((column, end), {}) for end in sorted(self.ends))
        return {seed: value for values in every for seed, value in values.items()}

    def estimate(self, column: str) -> Estimate | None:
        """Return mean, standard deviation and n over seeds of a column."""
        return mean_std(list(self.by_seed(column).values()))

    @functools.cached_property
    def paths(self) -> dict[int, pd.DataFrame]:
        """Every seed's scores of the base's metric on the way: step, macs, value.

        Of runs of one seed the one that was scored most often counts, of those the longest; a seed
        without a score after the cell's steps is left out, as everywhere.
        """
        metric, found = self.score.removeprefix("score."), dict[int, pd.DataFrame]()
        seeds = self.by_seed(self.score)
        known = [
            (seed, self.ways[run][metric])
            for seed, run in self.runs[["seed", "run"]].dropna().itertuples(index=False)
            if seed in seeds and metric in self.ways.get(run, ())
        ]
        known.sort(key=lambda item: (len(item[1]), item[1]["step"].iloc[-1]), reverse=True)
        for seed, path in known:
            found.setdefault(seed, path)
        return {seed: found[seed] for seed in seeds if seed in found}

    def at(self, steps: float) -> Cell:
        """Return the cell read after other steps; itself where nothing was scored there."""
        return replace(self, steps=steps) if self.by_seed(self.score, steps) else self

    def read_with(self, others: Sequence[Cell], ends: Iterable[float]) -> Cell:
        """Return the cell after the steps (of `ends`) with the most seeds to pair with the others.

        Where none of them pairs: after the others' steps, else after those that most seeds took.
        """

        def pairs(step: float) -> int:
            own = self.by_seed(self.score, step).keys()
            return sum(len(own & other.by_seed(self.score, step).keys()) for other in others)

        for steps in (ends, {end for other in others for end in other.ends}):
            best = max(steps, key=lambda step: (pairs(step), step), default=None)
            if best is not None and pairs(best):
                return replace(self, steps=best)
        usual = self._longest.mode().max()  # of two as frequent the larger
        return replace(self, steps=float("nan") if pd.isna(usual) else float(usual))

    @functools.cached_property
    def _longest(self) -> pd.Series:
        return self.runs.groupby("seed")["step"].max().dropna()

    @functools.cached_property
    def ends(self) -> set[float]:
        """The numbers of steps after which its runs ended."""
        return {float(step) for step in self.runs["step"].dropna()}

    @property
    def odd_steps(self) -> list[int]:
        """The numbers of steps of the seeds without a score after `steps`."""
        known = self.by_seed(self.score)
        return sorted({int(step) for seed, step in self._longest.items() if seed not in known})

    @property
    def macs_share(self) -> float | None:
        """The multiply-adds of a routed step over those of a dense one."""
        dense, routed = self.first("macs_dense"), self.first("macs_routed")
        return routed / dense if dense and routed else None

    @property
    def depth(self) -> int:
        """Number of blocks."""
        depth = self.first("config.backbone.depth")
        return int(depth) if depth is not None else parse_size(str(self.first("size"))).depth


@dataclass(frozen=True)
class Base:
    """All treatments of one base, the dense one apart; `recipe` is its key but for the backbone."""

    key: str
    recipe: str
    label: str
    metric: str
    known: Metrics  # of all runs
    dense: Cell | None
    routed: tuple[Cell, ...]

    @property
    def better(self) -> str:
        """The better end of its metric."""
        return self.known[self.metric].get("better") or "lower"

    @property
    def any(self) -> Cell:
        """Some cell, for what all cells share."""
        return self.dense or self.routed[0]

    @property
    def backbone(self) -> str:
        """Its name."""
        return str(self.any.first("backbone"))

    @property
    def model(self) -> str:
        """Backbone and size."""
        return f"{self.backbone}-{self.any.first('size')}"

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Dense first, then the treatments."""
        return ((self.dense,) if self.dense else ()) + self.routed

    @property
    def score(self) -> str:
        """Column of the metric."""
        return f"score.{self.metric}"

    @functools.cached_property
    def metrics(self) -> Metrics:
        """The metrics of its scores, its own first, then those in the same features.

        Of those that count samples, the ones of as many.
        """
        own = self.known[self.metric]
        found = {
            name: about
            for name, about in self.known.items()
            if about.get("features") is None or about.get("n") == own.get("n")
            if any(cell.by_seed(f"score.{name}") for cell in self.cells)
        }
        rank = {name: about.get("features") != own.get("features") for name, about in found.items()}
        return {self.metric: own} | {name: found[name] for name in sorted(found, key=rank.get)}  # type: ignore[arg-type]

    @functools.cached_property
    def by_kind(self) -> dict[Any, str]:
        """The metric of each kind (`fd`, `recall`), its own or in the features of that first."""
        return {about.get("key"): name for name, about in reversed(self.metrics.items())}

    @functools.cached_property
    def memory(self) -> str | None:
        """The metric of its NN-distance ratio, in the features of its score before pixels."""
        own, found = self.known[self.metric], dict[str, tuple[bool, bool, int]]()
        for name, about in self.known.items():
            features = about.get("key") == "memorisation"
            fits = about.get("features") == own.get("features") if features else True
            count = sum(len(cell.by_seed(f"score.{name}")) for cell in self.cells)
            if about.get("key") in ("memorisation", "memorisation_pixels") and fits and count:
                found[name] = (features, about.get("n") == own.get("n"), count)
        return max(found, key=found.__getitem__, default=None)

    @functools.cached_property
    def plain(self) -> list[Cell]:
        """The cells of TREAD itself, with the usual options."""
        return [c for c in self.routed if c.first("variant") == "TREAD" and is_usual(c)]

    def auto(self) -> Cell | None:
        """Return the guideline's cell (2 to depth-4 at 0.5), else the most replicated route."""
        span = f"2-{self.any.depth - 4}"
        for cell in self.plain:
            if cell.first("span") == span and cell.first("rate") == 0.5:
                return cell
        return max(self.plain, key=lambda cell: len(cell.by_seed(self.score)), default=None)

    @property
    def evidence(self) -> int:
        """The number of scores, by metric and seed, that dense runs and the guideline's share."""
        dense, routed = self.pair()
        if dense is None or routed is None:
            return 0
        columns = [f"score.{name}" for name in self.metrics]
        return sum(len(dense.by_seed(name).keys() & routed.by_seed(name)) for name in columns)

    def pair(self) -> tuple[Cell | None, Cell | None]:
        """Return the dense cell and the guideline's, after the same steps if both were scored."""
        routed = self.auto()
        return self.dense and (self.dense.at(routed.steps) if routed else self.dense), routed


def is_usual(cell: Cell, *except_for: str) -> bool:
    """Return whether a cell has one route throughout and, apart from those named, usual options."""
    return "/" not in str(cell.first("route")) and all(
        str(cell.first(f"config.routing.{key}", value)) == value
        for key, value in USUAL_OPTIONS.items()
        if key not in except_for
    )


@dataclass(frozen=True, eq=False)
class Study:
    """A set of runs and the metric it is read by (None: each base's own Frechet distance)."""

    runs: pd.DataFrame
    metric: str | None = None

    def __post_init__(self) -> None:
        check_attrs(self.runs)

    @classmethod
    def of(cls, source: Source, metric: str | None = None) -> Study:
        """Return a study of a folder, of loaded runs or of itself."""
        if isinstance(source, Study):
            return source if metric in (None, source.metric) else cls(source.runs, metric)
        return cls(source if isinstance(source, pd.DataFrame) else load(source), metric)

    @property
    def metrics(self) -> Metrics:
        """What each metric's name means."""
        return self.runs.attrs.get("metrics", {})

    @functools.cached_property
    def named(self) -> pd.DataFrame:
        """Its runs with base, recipe, setting and treatment (`grouping.named`)."""
        frame = named(self.runs)
        frame.attrs = {}  # pandas copies them, however large, with every column
        return frame

    @functools.cached_property
    def scores(self) -> pd.DataFrame:
        """Every score of every run with its cost."""
        found = scores(self.runs)
        found.attrs = {}  # as in `named`
        return found

    @functools.cached_property
    def bases(self) -> list[Base]:
        """Runs sorted into bases and treatments; `AnalysisError` if none has the metric."""
        known, found, paths = self.metrics, list[Base](), self._paths
        if self.metric is not None:
            pick("score", self.metric, known)
        for key, part in self.named.groupby("base", sort=False) if len(self.runs) else ():
            # The metric that most runs have, Frechet distances before others.
            counts = {n: part[f"score.{n}"].notna().sum() for n in known if f"score.{n}" in part}
            ranks = {n: (known[n].get("key") == "fd", own) for n, own in counts.items() if own}
            name = self.metric or max(ranks, key=ranks.__getitem__, default=None)
            if name is None or name not in ranks:
                continue
            cells = [
                Cell(str(text), runs, _scored(runs, paths), paths, f"score.{name}")
                for text, runs in part.groupby("treatment", sort=False)
            ]
            cells.sort(key=_order)
            dense = next((cell for cell in cells if cell.first("variant") == "dense"), None)
            others = [cell for cell in cells if cell is not dense]
            held = [dense] if dense else []
            routed = tuple(cell.read_with(held, cell.ends) for cell in others)
            if dense is not None:
                dense = dense.read_with(routed, dense.ends.union(*(cell.ends for cell in routed)))
            row = part.iloc[0]
            found.append(Base(str(key), row["recipe"], row["setting"], name, known, dense, routed))
        # The recipe with the most evidence leads, with all of its backbones.
        evidence: Counter[str] = Counter()
        for base in found:
            evidence[base.recipe] += base.evidence
        return sorted(found, key=lambda base: (-evidence[base.recipe], base.label))

    def pairs(self) -> Iterator[tuple[Base, Cell, Cell]]:
        """Yield every base that has both: with its dense cell and the guideline's."""
        for base in self.bases:
            dense, routed = base.pair()
            if dense is not None and routed is not None:
                yield base, dense, routed

    @functools.cached_property
    def _paths(self) -> Paths:
        """Every run's own scores, split once: they are asked for thousands of times."""
        if self.scores.empty:
            return {}
        own = self.scores.loc[self.scores["own"].astype(bool), ["run", "metric", *_PATH]]
        own = own.dropna(subset=["step", "value"]).sort_values("step", kind="stable")
        own = own.drop_duplicates(["run", "metric", "step"], keep="last")
        return {
            str(run): {metric: path[_PATH] for metric, path in part.groupby("metric", sort=False)}
            for run, part in own.groupby("run", sort=False)
        }


Source = Study | pd.DataFrame | str | Path


def study_for_command(options: argparse.Namespace) -> Study:
    """Return the study that a command line asks for; say on stderr what is left out of it."""
    study = Study.of(options.runs, options.metric)
    for item in study.runs.attrs["damaged"]:
        print(f"damaged: {item['run']}: {item['reason']}", file=sys.stderr)
    if count := len(study.runs.attrs["unfinished"]):
        print(f"unfinished: {count} (python -m analysis list {options.runs})", file=sys.stderr)
    return study


def _order(cell: Cell) -> tuple[Any, ...]:
    span = str(cell.first("span"))
    numbers = tuple(int(n) for n in span.replace("+", "-").split("-") if n.isdigit())
    variant = str(cell.first("variant"))
    rate = cell.first("rate", 2.0)  # a route with several rates stands after those with one
    place = (len(numbers), numbers, rate, cell.treatment)
    return (variant != "dense", variant != "TREAD", variant, *place)


def _scored(runs: pd.DataFrame, paths: Paths) -> dict[tuple[str, float], dict[int, float]]:
    """Return scores and costs by column, steps and seed: of a cell's runs' ends and on the way."""
    found: dict[tuple[str, float], dict[int, float]] = {}
    columns = [c for c in map(str, runs) if c.startswith("score.") or c in _OF_ANY_LENGTH]
    ends = runs[["run", "seed", "step", *columns]].dropna(subset=["seed"])
    for row in ends.sort_values("step", kind="stable").to_dict("records"):
        known = [(c, row["step"], row[c]) for c in columns if not pd.isna(row[c])]
        for metric, path in paths.get(row["run"], {}).items():
            points = zip(path["step"], path["value"], strict=True)
            known += [(f"score.{metric}", *point) for point in points]
        for column, step, value in known:
            found.setdefault((column, float(step)), {})[int(row["seed"])] = float(value)
    return found
