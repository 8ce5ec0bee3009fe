"""The tables of a study: each kind of block of pages (`analysis.reports.pages`) by its name."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from analysis.comparison.alignment import alignment_table
from analysis.comparison.arms import (
    Arm,
    Curves,
    arms,
    arms_table,
    endpoints_table,
    penalty_table,
    seeds_table,
)
from analysis.comparison.final_scores import final_scores, scores_table
from analysis.comparison.objectives import contrasts_table, objective_scores, objectives_table
from analysis.comparison.signature import signature_table
from analysis.comparison.training_length import lengths_table, slopes_table


@dataclass(frozen=True, eq=False)
class Records:
    """The runs of a study, as `analysis.load` returns them, and what tables are made from."""

    runs: pd.DataFrame

    @functools.cached_property
    def arms(self) -> dict[Arm, Curves]:
        """Held-out losses of every arm."""
        return arms(self.runs)

    @functools.cached_property
    def scores(self) -> dict[Arm, pd.DataFrame]:
        """Scores of every arm on samples after its last step."""
        return final_scores(self.runs)

    def scores_at(self, steps: int) -> pd.DataFrame:
        """Return the scores of dense and routed runs of every objective after so many steps."""
        return objective_scores(self.runs, steps)

    def on(self, data: str) -> "Records":
        """Return the records of the runs on one data set."""
        return Records(self.runs[self.runs["data"] == data])


# What each kind of block shows, made from the records, `steps` and the declared number of `pairs`.
KINDS: dict[str, Callable[[Records, int, int], list[list[str]]]] = {
    "arms": lambda records, steps, pairs: arms_table(records.arms),
    "penalty": lambda records, steps, pairs: penalty_table(records.arms, steps),
    "endpoints": lambda records, steps, pairs: endpoints_table(records.arms, steps, pairs),
    "seeds": lambda records, steps, pairs: seeds_table(records.arms, steps),
    "scores": lambda records, steps, pairs: scores_table(records.scores),
    "lengths": lambda records, steps, pairs: lengths_table(records.arms),
    "slopes": lambda records, steps, pairs: slopes_table(records.arms),
    "objectives": lambda records, steps, pairs: objectives_table(records.scores_at(steps)),
    "contrasts": lambda records, steps, pairs: contrasts_table(records.scores_at(steps)),
    "alignment": lambda records, steps, pairs: alignment_table(records.runs, steps),
    "signature": lambda records, steps, pairs: signature_table(records.runs),
}
