"""Every variant by every metric: means over seeds, and paired differences to the dense runs."""

import pandas as pd

from analysis.aggregation import KEYS, Estimate, aggregate, paired_difference
from analysis.groups import Group, Variant
from analysis.results import Results
from analysis.tables import entries
from analysis.tables.table import PAIRED, Column, Entry, RowValues, Table, Value, build


def all_scores(results: Results) -> Table:
    """Every variant's every score, mean and standard deviation over seeds."""
    columns = []
    for metric in _metrics(results):
        better = entries.metric_better(results.metrics[metric])
        columns.append(Column(entries.metric_label(metric), better=better))
    # The table shows the spread of the seeds.
    estimates = _pivot(aggregate(results.own_scores).assign(low=None, high=None))
    rows = _rows(results, estimates, signed=False)
    columns = [*Column.each("Tokens", "Steps", numeric=False), *columns]
    notes = entries.nn_ratio_notes(results)
    return build("all_scores", "Every score", columns, rows, notes)


def differences(results: Results) -> Table:
    """Every variant's difference to the dense runs, paired by seed, with 95 % intervals."""
    columns = list(Column.each("Tokens", "Steps", numeric=False))
    for metric in _metrics(results):
        columns.append(Column(f"\u0394 {entries.metric_label(metric)}"))
    baselines = {}
    for group in results.groups:
        if group.baseline is not None:
            baselines[group.label] = group.baseline.name
    estimates = _pivot(paired_difference(results.own_scores, baselines))
    rows = _rows(results, estimates, signed=True)
    title = "Differences to dense, paired by seed and step"
    return build("differences", title, columns, rows, (PAIRED,))


def _rows(
    results: Results, estimates: dict[tuple[str, str, float], dict[str, Estimate]], signed: bool
) -> list[RowValues]:
    """Return a row per variant with its estimate by every metric; signed ones are differences."""
    rows: list[RowValues] = []
    for group in results.groups:
        for variant in group.routed if signed else group.variants:
            by_metric = estimates.get((group.label, variant.name, variant.step), {})
            values = _first_columns(variant)
            for metric in _metrics(results):
                values.append(_entry(by_metric.get(metric), metric, signed))
            rows.append((_heading(group), values))
    return rows


def _metrics(results: Results) -> list[str]:
    """Return the metrics of the runs' last scores."""
    names = []
    for metric in results.final_metrics:
        # The ratio of held-out images is no score of a run; it is in a note.
        if not str(results.metrics[metric].get("key")).endswith("_heldout"):
            names.append(metric)
    return names


def _pivot(statistics: pd.DataFrame) -> dict[tuple[str, str, float], dict[str, Estimate]]:
    """Return the estimates of an aggregate by group, variant and step, then by metric."""
    table: dict[tuple[str, str, float], dict[str, Estimate]] = {}
    columns = [*KEYS, "mean", "n", "std", "low", "high"]
    for group, variant, metric, step, *numbers in statistics[columns].itertuples(index=False):
        mean, n, *bounds = numbers
        std, low, high = (None if pd.isna(value) else float(value) for value in bounds)
        estimate = Estimate(float(mean), int(n), std, low, high)
        table.setdefault((group, variant, float(step)), {})[metric] = estimate
    return table


def _entry(estimate: Estimate | None, metric: str, signed: bool) -> Entry:
    if signed:
        return entries.signed(estimate, metric)
    return entries.measured(estimate, entries.metric_decimals(metric))


def _first_columns(variant: Variant) -> list[Value]:
    return [variant.name, entries.steps(variant)]


def _heading(group: Group) -> str:
    """Return what a group's runs share, with guidance and sampler where they are known."""
    protocol = []
    for key in ("guidance", "sampler"):
        value = group.first(key)
        if value:
            protocol.append(f"{key} {value}")
    return f"{group.label}; {', '.join(protocol)}" if protocol else group.label
