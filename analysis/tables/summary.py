"""One row per backbone, number of steps or variant, with a score of each kind in its columns."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import pandas as pd

from analysis.comparison.aggregation import Estimate, paired
from analysis.comparison.groups import Group, Variant
from analysis.comparison.results import Results
from analysis.tables import entries
from analysis.tables.table import Column, RowValues, Table, Value, build

_KINDS = ("fd", "precision", "recall", "accuracy", "heldout_loss", "w_eff")
_DIFFERENCE = "difference, paired by seed, \u00b1 half-width of the 95 % t-interval"
_ARROW = f"Dense \u2192 routed ({_DIFFERENCE})."
_LATER = "Scores of a later evaluation: analysis.scores(RUNS)."
_MEAN = f"Mean ({_DIFFERENCE})."
# Two trainings cost the same if one takes this share of the other's multiply-adds. Steps are whole
# numbers, so runs of equal cost may also end just above 1.
_SAME_COST = (0.95, 1.01)


def summary(results: Results) -> Table:
    """The main table in a row per backbone: `dense -> routed (paired difference)` of each score."""
    rows: list[RowValues] = []
    for group, dense, routed in results.pairs():
        # The heading is what the backbones share.
        metric = entries.metric_label(group.metric)
        heading = f"{group.label.partition(', ')[2]}: route {routed.name}, {metric}"
        heading += entries.after([routed])
        # Where dense runs were not scored after as many steps, the row has no numbers.
        n, changes = _changes(group, replace(dense, step=routed.step), routed)
        rows.append((heading, [group.model, n, routed.macs_share, *changes]))
    rows.sort(key=lambda row: row[0])
    columns = _columns(results, "Backbone", "MACs per step")
    return build("summary", "Dense against routed, a row per backbone", columns, rows, [_ARROW])


def steps_and_cost(results: Results) -> Table:
    """Dense against routed after equal steps, and after equal multiply-adds of training."""
    rows: list[RowValues] = []
    for group, dense, routed in results.pairs():
        metric = entries.metric_label(group.metric)
        heading = f"{group.label}: route {routed.name}, {metric}"
        group_rows = _rows_by_steps(group, dense, routed)
        most = max((n for n, _ in group_rows), default=0)
        if len(group_rows) > 1:
            for n, values in group_rows:
                # A comparison of one seed is left out beside those of several.
                if n >= min(2, most):
                    rows.append((heading, values))
    note = "Two numbers of steps: the routed runs' multiply-adds are those of the dense."
    title = "Dense against routed after equal steps and at equal cost"
    columns = _columns(results, "Steps, dense \u2192 routed", "MACs")
    absent = []
    for index, column in enumerate(columns):
        if rows and all(values[index] is None for _, values in rows):
            columns[index] = replace(column, shown=False)
            absent.append(column.label)
    notes = [_ARROW, note]
    if absent:
        notes.append(f"Not scored under the runs' own protocol: {', '.join(absent)}. {_LATER}")
    return build("steps", title, columns, rows, notes)


def _rows_by_steps(
    group: Group, dense: Variant, routed: Variant
) -> list[tuple[int, Sequence[Value]]]:
    """Return the number of seeds and the row of each pair of steps to compare."""
    dense_cost, routed_cost = _training_macs(dense), _training_macs(routed)
    low, high = _SAME_COST
    equal_steps, equal_cost, shares = [], [], {}
    for dense_step, macs in dense_cost.items():
        if dense_step in routed_cost:
            equal_steps.append((dense_step, dense_step))
        similar = []
        for routed_step in routed_cost if macs else ():
            share = routed_cost[routed_step] / macs
            shares[dense_step, routed_step] = share
            if routed_step != dense_step and low <= share <= high:
                seeds = dense.by_seed(step=dense_step).keys() & routed.by_seed(step=routed_step)
                similar.append((-len(seeds), abs(share - 1), routed_step))
        if similar:  # the pair of most seeds; of several the nearest to equal cost
            equal_cost.append((dense_step, min(similar)[-1]))
    rows: list[tuple[int, Sequence[Value]]] = []
    for steps in (*equal_steps, *equal_cost):
        n, changes = _changes(group, dense.at(steps[0]), routed.at(steps[1]))
        name = " \u2192 ".join(dict.fromkeys(f"{step:.0f}" for step in steps))
        rows.append((n, [name, n, shares.get(steps), *changes]))
    return rows


def _training_macs(variant: Variant) -> dict[float, float]:
    """Return the multiply-adds of training by the number of steps that a variant was scored at."""
    curves = list(variant.curves.values())
    return dict(pd.concat(curves).groupby("step")["macs"].mean()) if curves else {}


def treatments(results: Results) -> Table:
    """Every variant in a row: the mean of each score, with its paired difference to dense."""
    rows: list[RowValues] = []
    for group in results.groups:
        if group.baseline is None or len(group.routed) < 2:
            continue
        heading = f"{group.label}: {entries.metric_label(group.metric)}"
        heading += entries.after(group.variants)
        for variant in group.variants:
            n = len(variant.by_seed())
            scores = _means(group, group.baseline, variant, n)
            rows.append((heading, [variant.name, n, variant.macs_share, *scores]))
    columns = _columns(results, "Tokens", "MACs per step")
    return build("treatments", "Every variant against dense", columns, rows, [_MEAN])


def _columns(results: Results, first: str, cost: str) -> list[Column]:
    better = {metric.get("key"): metric.get("better") for metric in results.metrics.values()}
    columns = [Column(first, numeric=False), Column("Seeds", decimals=0), Column(cost, unit="x")]
    for kind in _KINDS:
        columns.append(Column("FD" if kind == "fd" else kind, better=better.get(kind)))
    return columns


def _changes(group: Group, dense: Variant, routed: Variant) -> tuple[int, list[Value]]:
    """Return the number of seeds that both were scored with, and `dense -> routed` per score."""
    n = len(dense.by_seed().keys() & routed.by_seed().keys())
    texts: list[Value] = []
    for kind in _KINDS:
        metric = group.metric_of_kind(kind) or ""
        before, after = dense.by_seed(metric), routed.by_seed(metric)
        seeds = before.keys() & after.keys()
        if not seeds:
            texts.append(None)
            continue
        digits = entries.metric_decimals(metric)
        means = (fmean(values[seed] for seed in seeds) for values in (before, after))
        text = " \u2192 ".join(f"{mean:.{digits}f}" for mean in means)
        text += _change(paired(before, after), digits)
        texts.append(text if len(seeds) == n else f"{text}, n={len(seeds)}")
    return n, texts


def _means(group: Group, baseline: Variant, variant: Variant, n: int) -> list[Value]:
    """Return the mean of a score of each kind, with its difference to the baseline."""
    texts: list[Value] = []
    for kind in _KINDS:
        metric = group.metric_of_kind(kind) or ""
        scores = variant.by_seed(metric)
        if not scores:
            texts.append(None)
            continue
        digits = entries.metric_decimals(metric)
        text = f"{fmean(scores.values()):.{digits}f}"
        change = None if variant is baseline else entries.gap(variant, baseline, metric)
        text += _change(change, digits)
        if change and change.low is not None and change.n != n:
            text += f", n={change.n}"
        texts.append(text)
    return texts


def _change(difference: Estimate | None, digits: int) -> str:
    """Return ` (+0.12 +- 0.03)`, or nothing where there is no interval."""
    if difference is None or difference.low is None:
        return ""
    half = difference.mean - difference.low
    return f" ({difference.mean:+.{digits}f} \u00b1 {half:.{digits}f})"
