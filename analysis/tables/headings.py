"""Pieces that several tables share."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from analysis.runs.cells import Base, Cell, Study
from analysis.runs.statistics import Estimate, paired
from analysis.tables.paper import main_row
from analysis.tables.table import Entry, ours, words

# Hours of two machines say nothing about routing.
OTHER_MACHINE = words("other machine")
PAIRED = "Differences are paired by seed and step, with Student's 95 % interval."


def decimals(base: Base) -> int:
    """Return the digits a metric is shown with: distances two, shares three."""
    return metric_decimals(base.metric)


def metric_decimals(metric: str) -> int:
    """Return the digits of a metric by its full name."""
    shares = ("accuracy", "precision", "recall", "memorisation", "adherence")
    return 3 if metric.lower().startswith(shares) else 2


class Heading(str):
    """A group's heading.

    Attributes:
        mixed: Its rows took different numbers of steps: none of them is the best.
    """

    mixed = False


def heading(base: Base, *cells: Cell | None, tail: str = "") -> Heading:
    """Return a group's heading: what its runs share, the metric, the guidance, the steps.

    Args:
        base: The group.
        cells: Those that the table shows; all of the group's by default.
        tail: Text after it.
    """
    guidance = base.any.first("guidance")
    # A plain pass has a scale of 1 by definition.
    protocol = f", guidance {'none' if guidance == 'none scale=1.0' else guidance}"
    shown = [cell for cell in cells if cell is not None] or list(base.cells)
    label = f"{base.label}: {base.metric}{protocol if guidance else ''}"
    made = Heading(f"{label}{after(shown)}{tail}")
    made.mixed = len({cell.steps for cell in shown}) > 1
    return made


def after(cells: Sequence[Cell]) -> str:
    """Return the steps after which cells are read, `, after 400 steps (4-8: 600)`."""
    texts = {cell.treatment: steps(cell) for cell in cells}
    usual, _ = collections.Counter(f"{cell.steps:.0f}" for cell in cells).most_common(1)[0]
    others = [f"{name}: {text}" for name, text in texts.items() if text != usual]
    return f", after {usual} steps" + (f" ({'; '.join(others)})" if others else "")


def steps(cell: Cell) -> str:
    """Return the number of steps behind a cell's scores, and those of seeds that are left out."""
    odd = f", without the seeds of {', '.join(map(str, cell.odd_steps))}" if cell.odd_steps else ""
    return f"{cell.steps:.0f}{odd}"


def better_end(study: Study) -> str | None:
    """Return the better end of the metric that a study is read by; None where bases differ."""
    ends = {base.better for base in study.bases}
    return ends.pop() if len(ends) == 1 else ("lower" if not ends else None)


def score(base: Base, cell: Cell | None) -> Entry:
    """Return a cell's score."""
    return ours(cell.estimate(base.score) if cell else None, decimals(base))


def difference(base: Base, cell: Cell | None, baseline: Cell | None) -> Entry:
    """Return a cell's score minus the baseline's after the same steps, paired by seed."""
    estimate = gap(cell, baseline, base.score)
    return ours(estimate, decimals(base), signed=True)


def gap(cell: Cell | None, baseline: Cell | None, column: str) -> Estimate | None:
    """Return a cell's column minus the baseline's after the same steps, paired by seed."""
    if cell is None or baseline is None:
        return None
    return paired(baseline.by_seed(column, cell.steps), cell.by_seed(column))


def paper_main(base: Base) -> dict[str, Any] | None:
    """Return the paper's main row of this size, else DiT-B/2's, where its ablations stand."""
    cell = base.any
    family, objective = str(cell.first("backbone")), str(cell.first("objective"))
    exact = main_row(family, objective, str(cell.first("size")))
    return exact or main_row(family, objective, "B/2")
