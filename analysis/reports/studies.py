"""Tables of a study, for the blocks of pages and for `python -m analysis.compute RECORDS`.

    arms         every arm: its held-out loss at its end, with its multiply-adds
    penalty      step penalty s and s * m of routed arms
    endpoints    declared paired endpoints at equal multiply-adds
    seeds        their values by seed
    scores       scores on samples after the last step
    lengths      s * m against the number of dense steps
    slopes       how s * m grows with it
    objectives   dense and routed scores of several objectives after `steps` steps
    contrasts    their declared differences

An arm is a group and variant (`analysis.comparison.arms`).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd

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
from analysis.comparison.results import Results
from analysis.comparison.training_length import lengths_table, slopes_table
from analysis.errors import AnalysisError
from analysis.tables.table import markdown_rows

STEPS = 3000  # dense steps of the target


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
}
_OF_OBJECTIVES = ("objectives", "contrasts")  # printed where there are several
_HALF = "\u00b1 half-width of the 95 % t-interval"
_NOTES = {
    "arms": f"Held-out loss: mean {_HALF}. MACs: forward multiply-adds; training FLOPs = 6 x.",
    "scores": f"In brackets: difference from dense, paired by seed, {_HALF}.",
}


@functools.lru_cache(maxsize=8)  # a page has several tables of one archive
def _records(results: Results, data: str | None) -> Records:
    runs = results.runs
    return Records(runs if data is None else runs[runs["data"] == data])


def block(kind: str, results: Results, options: Sequence[str]) -> str:
    """Return the table of a page's block.

    Args:
        kind: One of `KINDS`.
        results: Where the runs are.
        options: Of `steps=N` (dense steps), `data=NAME` and `pairs=N` (the declared number).

    Raises:
        AnalysisError: An unknown option.
    """
    values = {}
    for option in options:
        key, _, value = option.partition("=")
        if key not in ("steps", "data", "pairs"):
            raise AnalysisError(f"{kind} {option}: expected steps=N, data=NAME or pairs=N")
        values[key] = value
    records = _records(results, values.get("data"))
    steps, pairs = int(values.get("steps", STEPS)), int(values.get("pairs", 2))
    head, *rows = KINDS[kind](records, steps, pairs)
    return markdown_rows(head, rows)


def every_table(runs: pd.DataFrame, steps: int) -> str:
    """Return the tables that have rows, with notes; in place of one that fails, the reason."""
    records = Records(runs)
    texts = []
    for kind, make in KINDS.items():
        if kind in _OF_OBJECTIVES and runs["objective"].nunique() < 2:
            continue
        try:
            head, *rows = make(records, steps, 2)
        except AnalysisError as error:  # such as runs that end before the compared MACs
            texts.append(f"No table of {kind}: {error}\n")
            continue
        if rows:
            note = f"\n{_NOTES[kind]}\n" if kind in _NOTES else ""
            texts.append(markdown_rows(head, rows) + note)
    return "\n".join(texts)
