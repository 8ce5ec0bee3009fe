"""Tables of a study's arms, for the blocks of pages and for `python -m analysis.compute RECORDS`.

    arms        every arm: its held-out loss at its end, with its multiply-adds
    penalty     step penalty s and s * m of routed arms
    endpoints   declared paired endpoints at equal multiply-adds
    seeds       their values by seed
    scores      scores on samples after the last step

An arm is a group and variant (`analysis.comparison.arms`).
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from analysis.comparison.arms import (
    Arm,
    arms,
    arms_table,
    endpoints_table,
    penalty_table,
    seeds_table,
)
from analysis.comparison.final_scores import final_scores, scores_table
from analysis.comparison.results import Results
from analysis.errors import AnalysisError
from analysis.runs.loading import Runs
from analysis.tables.table import markdown_rows

KINDS = ("arms", "penalty", "endpoints", "seeds", "scores")
STEPS = 3000  # dense steps of the target
_HALF = "\u00b1 half-width of the 95 % t-interval"
_NOTES = {
    "arms": f"Held-out loss: mean {_HALF}. MACs: forward multiply-adds; training FLOPs = 6 x.",
    "scores": f"In brackets: difference from dense, paired by seed, {_HALF}.",
}


def block(kind: str, results: Results, options: Sequence[str]) -> str:
    """Return the table of a page's block.

    Args:
        kind: One of `KINDS`.
        results: Where the runs are.
        options: Of `steps=N` (dense steps), `data=NAME` and `pairs=N` (the declared number).

    Raises:
        AnalysisError: An unknown option.
    """
    values = {"steps": str(STEPS), "pairs": "2"}
    for option in options:
        key, _, value = option.partition("=")
        if key not in ("steps", "data", "pairs"):
            raise AnalysisError(f"{kind} {option}: expected steps=N, data=NAME or pairs=N")
        values[key] = value
    by_arm = _final_scores(results) if kind == "scores" else _curves(results)
    chosen = {}
    for arm, of_arm in by_arm.items():
        if values.get("data", arm.data) == arm.data:
            chosen[arm] = of_arm
    head, *rows = _rows(kind, chosen, int(values["steps"]), int(values["pairs"]))
    return markdown_rows(head, rows)


# A page has several tables of one archive.
@functools.lru_cache(maxsize=8)
def _curves(results: Results) -> Mapping[Arm, Any]:
    return arms(results.runs)


@functools.lru_cache(maxsize=8)
def _final_scores(results: Results) -> Mapping[Arm, Any]:
    return final_scores(results.runs)


def every_table(source: Runs, steps: int) -> str:
    """Return the tables that have rows, with notes; in place of one that fails, the reason."""
    curves, final = arms(source), final_scores(source)
    texts = []
    for kind in KINDS:
        by_arm: Mapping[Arm, Any] = final if kind == "scores" else curves
        try:
            head, *rows = _rows(kind, by_arm, steps)
        except AnalysisError as error:  # such as runs that end before the compared MACs
            texts.append(f"No table of {kind}: {error}\n")
            continue
        if rows:
            note = f"\n{_NOTES[kind]}\n" if kind in _NOTES else ""
            texts.append(markdown_rows(head, rows) + note)
    return "\n".join(texts)


def _rows(kind: str, table: Mapping[Arm, Any], steps: int, pairs: int = 2) -> list[list[str]]:
    """Return the heading and rows of a table, from each arm's final scores or its curves."""
    if kind == "scores":
        return scores_table(table)
    if kind == "arms":
        return arms_table(table)
    if kind == "penalty":
        return penalty_table(table, steps)
    if kind == "seeds":
        return seeds_table(table, steps)
    return endpoints_table(table, steps, pairs)
