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
    alignment    changes by REPA or SRA, dense and routed, after `steps` steps
    signature    how a route, guidance and routed inference change scores

An arm is a group and variant (`analysis.comparison.arms`).
"""

import functools
from collections.abc import Sequence

import pandas as pd

from analysis.comparison.results import Results
from analysis.comparison.study_tables import KINDS, Records
from analysis.errors import AnalysisError
from analysis.tables.table import markdown_rows
from backbones.parsing import whole

STEPS = 3000  # dense steps of the target
_OF_OBJECTIVES = ("objectives", "contrasts")  # printed where there are several
_HALF = "\u00b1 half-width of the 95 % t-interval"
_NOTES = {
    "arms": f"Held-out loss: mean {_HALF}. MACs: forward multiply-adds; training FLOPs = 6 x.",
    "scores": f"In brackets: difference from dense, paired by seed, {_HALF}.",
    "alignment": f"Changes by alignment, paired by seed, {_HALF}; that of the held-out loss is in "
    "per cent. MACs ratio: with SRA's teacher, without REPA's encoder.",
    "signature": f"Differences of scores, paired by seed, {_HALF}. Change: the score under a "
    "setting minus that without guidance. Routed inference: the routed pass alone, at rate 0.5.",
}


@functools.lru_cache(maxsize=8)  # a page has several tables of one archive
def _records(results: Results, data: str | None) -> Records:
    records = Records(results.runs)
    return records if data is None else records.on(data)


def block(kind: str, results: Results, options: Sequence[str]) -> str:
    """Return the table of a page's block.

    Args:
        kind: One of `study_tables.KINDS`.
        results: Where the runs are.
        options: Of `steps=N` (dense steps), `data=NAME` and `pairs=N` (the declared number).

    Raises:
        AnalysisError: An unknown option, or a number that is none.
    """
    values = {}
    for option in options:
        key, _, value = option.partition("=")
        if key not in ("steps", "data", "pairs"):
            raise AnalysisError(f"{kind} {option}: expected steps=N, data=NAME or pairs=N")
        values[key] = value
    records = _records(results, values.get("data"))
    steps, pairs = values.get("steps", STEPS), values.get("pairs", 2)
    steps = whole(steps, f"{kind} steps=", AnalysisError)
    pairs = whole(pairs, f"{kind} pairs=", AnalysisError)
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
