"""Routed models against dense ones at equal multiply-adds: the same network, then cheaper ones."""

import math

from analysis.comparison.aggregation import Estimate
from analysis.comparison.equal_macs import Comparison, comparisons, loss_curves
from analysis.comparison.results import Results
from analysis.tables.table import Column, Entry, RowValues, Table, Value, build

_NOTES = (
    "Change of the held-out loss (dense pass) at equal training multiply-adds (MACs): mean over "
    "paired seeds with the 95 % t-interval. Below 0 the route is better. N is the largest number "
    "of steps of the dense model whose MACs every run of the pair has reached. Losses are "
    "interpolated to the exact MACs.",
    "m: MACs per step, routed over dense. s*m: MACs to the dense model's loss at N, relative to "
    "it; below 1 the route saves. Trend: how the change moves per doubling of the MACs; above 0, a "
    "saving shrinks with training. Nothing is forecast beyond these runs.",
    "A route pays only if it pays against its own network and against every cheaper dense model: "
    "anything cheaper per step wins early in training.",
)


def equal_macs(results: Results) -> Table:
    """Every routed variant against dense models at equal multiply-adds."""
    rows: list[RowValues] = []
    for pair in comparisons(loss_curves(results)):
        rows.append((pair.heading, _values(pair)))
    columns = (
        Column("Routed as", numeric=False),
        Column("Compared with", numeric=False),
        Column("m"),
        *Column.each("at N/4", "at N/2", "at N", numeric=False),
        Column("Trend per doubling", numeric=False),
        Column("N", decimals=0),
        Column("s*m at N", numeric=False),
        Column("So far", numeric=False),
    )
    return build("equal_macs", "Routed against dense at equal multiply-adds", columns, rows, _NOTES)


def _values(pair: Comparison) -> list[Value]:
    early = [Entry("not logged")] * (3 - len(pair.change))
    changes = [_percent(estimate) for estimate in pair.change]
    if pair.penalty is not None:
        penalty = Entry(pair.penalty.text(".2f"))
    else:
        seeds = pair.change[-1].n
        text = (
            f"not reached by {pair.censored} of {seeds}" if pair.censored else "before first score"
        )
        penalty = Entry(text)
    trend = Entry("") if pair.trend is None else _points(pair.trend)
    return [
        pair.variant, pair.opponent, pair.m, *early, *changes, trend, pair.steps[-1], penalty,
        pair.verdict,
    ]  # fmt: skip


def _percent(estimate: Estimate) -> Entry:
    """Return a mean of log ratios as a change in per cent."""
    ends = [estimate.mean, estimate.low, estimate.high]
    mean, low, high = (None if end is None else 100 * math.expm1(end) for end in ends)
    assert mean is not None
    text = f"{mean:+.2f} %"
    if low is not None and high is not None:
        text += f" [{low:+.2f}, {high:+.2f}]"
    return Entry(f"{text} (n={estimate.n})")


def _points(estimate: Estimate) -> Entry:
    text = f"{100 * estimate.mean:+.2f}"
    if estimate.low is not None and estimate.high is not None:
        text += f" [{100 * estimate.low:+.2f}, {100 * estimate.high:+.2f}]"
    return Entry(text)
