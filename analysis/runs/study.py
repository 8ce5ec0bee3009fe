"""Everything tables and figures draw from, read once: runs, bases and scores over training."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from analysis.runs.cells import Cell
from analysis.runs.comparison_groups import Base, bases
from analysis.runs.history import scores
from analysis.runs.run_records import load

_PATH = ("step", "macs", "hours", "value")


@dataclass(frozen=True, eq=False)
class Study:
    """A set of runs and the metric it is read by (None: each base's own Frechet distance)."""

    runs: pd.DataFrame
    metric: str | None = None

    @classmethod
    def of(cls, source: Study | pd.DataFrame | str | Path, metric: str | None = None) -> Study:
        """Return a study of a folder, of loaded runs or of itself."""
        if isinstance(source, Study):
            return source
        return cls(source if isinstance(source, pd.DataFrame) else load(source), metric)

    @functools.cached_property
    def bases(self) -> list[Base]:
        """Runs sorted into bases and treatments."""
        return bases(self.runs, self.metric, self.scores)

    @functools.cached_property
    def scores(self) -> pd.DataFrame:
        """Every score of every run with its cost."""
        return scores(self.runs)

    @functools.cached_property
    def _paths(self) -> dict[tuple[str, str], pd.DataFrame]:
        known = self.scores
        if known.empty or "metric" not in known:
            return {}
        # Split once: tables and figures ask for a run's path thousands of times.
        own = known.loc[known["own"].astype(bool), ["metric", "run", *_PATH]].sort_values("step")
        groups = own.groupby(["metric", "run"], sort=False)
        return {
            (str(metric), str(run)): part[list(_PATH)].reset_index(drop=True)
            for (metric, run), part in groups
        }

    def path(self, base: Base, run: str) -> pd.DataFrame:
        """Return one run's scores of the base's metric: step, macs, hours, value."""
        return self._paths.get((base.metric, run), pd.DataFrame(columns=list(_PATH)))

    def by_seed(self, base: Base, cell: Cell) -> dict[int, pd.DataFrame]:
        """Return every seed's scores over training, as `path`.

        Of runs of one seed the one that was scored most often counts, of those the longest; a seed
        without a score after the cell's steps is left out, as everywhere.
        """
        seeds = cell.by_seed(base.score)
        found: dict[int, pd.DataFrame] = {}
        for seed, run in zip(cell.runs["seed"], cell.runs["run"], strict=True):
            path = self.path(base, str(run)).drop_duplicates("step", keep="last")
            if pd.isna(seed) or int(seed) not in seeds or path.empty:
                continue
            known = found.get(int(seed))
            rank = (len(path), path["step"].iloc[-1])
            if known is None or rank > (len(known), known["step"].iloc[-1]):
                found[int(seed)] = path
        return found
