"""Every variant by every metric: means over seeds, and paired differences to the dense runs."""

from analysis.comparison.groups import Group
from analysis.comparison.results import Results
from analysis.tables import entries
from analysis.tables.table import PAIRED, Column, RowValues, Table, build


def all_scores(results: Results) -> Table:
    """Every variant's every score, mean over seeds and half-width of its interval."""
    metrics = _metrics(results)
    columns = list(Column.each("Tokens", "Steps", numeric=False))
    for metric in metrics:
        better = entries.metric_better(results.metrics[metric])
        columns.append(Column(entries.metric_label(metric), better=better))
    rows: list[RowValues] = []
    for group in results.groups:
        for variant in group.variants:
            scores = [entries.score(metric, variant) for metric in metrics]
            rows.append((_heading(group), [variant.name, entries.steps(variant), *scores]))
    notes = entries.nn_ratio_notes(results)
    return build("all_scores", "Every score", columns, rows, notes)


def differences(results: Results) -> Table:
    """Every variant's difference to the dense runs, paired by seed, with 95 % intervals."""
    metrics = _metrics(results)
    columns = list(Column.each("Tokens", "Steps", numeric=False))
    for metric in metrics:
        columns.append(Column(f"\u0394 {entries.metric_label(metric)}"))
    rows: list[RowValues] = []
    for group in results.groups:
        for variant in group.routed:
            changes = []
            for metric in metrics:
                changes.append(entries.difference(metric, variant, group.baseline))
            rows.append((_heading(group), [variant.name, entries.steps(variant), *changes]))
    title = "Differences to dense, paired by seed and step"
    return build("differences", title, columns, rows, (PAIRED,))


def _metrics(results: Results) -> list[str]:
    """Return the metrics of the runs' last scores."""
    names = []
    for metric in results.final_metrics:
        # The ratio of held-out images is no score of a run; it is in a note.
        if not str(results.metrics[metric].get("key")).endswith("_heldout"):
            names.append(metric)
    return names


def _heading(group: Group) -> str:
    """Return what a group's runs share, with guidance and sampler where they are known."""
    protocol = []
    for key in ("guidance", "sampler"):
        value = group.first(key)
        if value:
            protocol.append(f"{key} {value}")
    return f"{group.label}; {', '.join(protocol)}" if protocol else group.label
