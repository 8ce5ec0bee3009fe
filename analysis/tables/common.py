"""Pieces that several tables share."""

from __future__ import annotations

from typing import Any

from analysis.groups import Base, Cell
from analysis.paper import main_row
from analysis.stats import paired
from analysis.table import Entry, ours

PAIRED = "Differences are paired by seed, with Student's 95 % interval."


def decimals(base: Base) -> int:
    """Return the digits a metric is shown with: distances two, shares three."""
    return metric_decimals(base.metric)


def metric_decimals(metric: str) -> int:
    """Return the digits of a metric by its full name."""
    shares = ("accuracy", "precision", "recall", "memorisation", "adherence")
    return 3 if metric.lower().startswith(shares) else 2


def heading(base: Base) -> str:
    """Return a group's heading: what its runs share, the metric, the guidance."""
    guidance = base.any.first("guidance")
    protocol = f", guidance {guidance}" if guidance else ""
    return f"{base.label}: {base.metric}{protocol}"


def score(base: Base, cell: Cell | None) -> Entry:
    """Return a cell's score."""
    return ours(cell.estimate(base.score) if cell else None, decimals(base))


def difference(base: Base, cell: Cell | None, baseline: Cell | None) -> Entry:
    """Return a cell's score minus the baseline's, paired by seed."""
    if cell is None or baseline is None:
        return ours(None)
    estimate = paired(baseline.by_seed(base.score), cell.by_seed(base.score))
    return ours(estimate, decimals(base), signed=True)


def paper_main(base: Base) -> dict[str, Any] | None:
    """Return the paper's main row of this size, else DiT-B/2's, where its ablations stand."""
    cell = base.any
    family, objective = str(cell.first("backbone")), str(cell.first("objective"))
    exact = main_row(family, objective, str(cell.first("size")))
    return exact or main_row(family, objective, "B/2")
