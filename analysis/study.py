"""Everything tables and figures draw from, read once: runs, bases and scores over training."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from analysis.groups import Base, bases
from analysis.history import scores
from analysis.runs import load


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
        return bases(self.runs, self.metric)

    @functools.cached_property
    def scores(self) -> pd.DataFrame:
        """Every score of every run with its cost."""
        return scores(self.runs)

    def path(self, base: Base, run: str) -> pd.DataFrame:
        """Return one run's scores of the base's metric: step, macs, hours, value."""
        known = self.scores
        if known.empty or "metric" not in known:
            return known
        rows = known[(known["run"] == run) & (known["metric"] == base.metric) & known["own"]]
        return rows[["step", "macs", "hours", "value"]].sort_values("step").reset_index(drop=True)
