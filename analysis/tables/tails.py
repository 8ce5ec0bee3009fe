"""A dense tail: routed runs that are trained on without their route (the paper's F)."""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from analysis.comparison.aggregation import paired
from analysis.comparison.groups import Group, Variant
from analysis.comparison.results import Results
from analysis.runs.grouping import FINE_TUNE, parent
from analysis.tables import entries
from analysis.tables.main import metric_row, score_set
from analysis.tables.table import Column, RowValues, Table, build


class Tail(NamedTuple):
    """Routed runs with their dense tail, the dense runs, and both trained on as they were."""

    group: Group
    dense: Variant
    routed: Variant
    tail: Variant
    dense_continued: Variant | None
    routed_continued: Variant | None


def tails(results: Results) -> Table:
    """Dense, routed, and routed with a dense tail, a row per metric, with the tail's differences.

    Where both were trained on unchanged, by the tail's steps at its learning rate, the tail is
    compared with these: what remains is the effect of the route.
    """
    comparisons = _tails(results)
    controlled = any(tail.dense_continued or tail.routed_continued for tail in comparisons)
    labels = ["Dense", "Routed"]
    references = ["Dense", "Routed"]
    if controlled:
        references = ["Dense + same", "Routed + same"]
        labels += references
    columns = [Column("Metric", numeric=False), *Column.each(*labels, "+ tail")]
    for label in reversed(references):
        columns.append(Column(f"\u0394 tail, {label.lower()}"))
    rows: list[RowValues] = []
    for comparison in comparisons:
        rows += _rows(comparison, controlled)
    notes = ["Differences are paired by seed, with Student's 95 % interval."]
    if controlled:
        notes.append("+ same: as many steps more at the tail's learning rate, routed as before.")
    return build("tails", "A dense tail on routed runs (the paper's F)", columns, rows, notes)


def _rows(comparison: Tail, controlled: bool) -> list[RowValues]:
    group, dense, routed, tail, *continued = comparison
    # The details in brackets are those of the tails' own configuration.
    label = group.label.partition(" (")[0]
    heading = f"{label}: route {routed.name}, after {routed.step:.0f} steps, "
    heading += f"and {tail.step:.0f} of tail"
    if routed.macs_share and dense.step > 0:
        spent = (routed.step * routed.macs_share + tail.step) / dense.step
        heading += f": {spent:.2f}x dense's MACs"
    references: list[Variant | None] = continued if controlled else [dense, routed]
    variants = [dense, routed, *(continued if controlled else ()), tail]
    rows: list[RowValues] = []
    for metric in score_set(group):
        scores = tail.by_seed(metric)
        if not scores:
            continue
        changes = []
        for reference in reversed(references):
            change = paired(reference.by_seed(metric), scores) if reference else None
            changes.append(entries.signed(change, metric))
        rows.append((heading, metric_row(group, metric, variants, changes)))
    return rows


def _tails(results: Results) -> list[Tail]:
    comparisons = []
    for group, dense, routed in results.pairs():
        tail_group, tail = next(_continued(results, group, routed, FINE_TUNE), (None, None))
        if tail_group is None or tail is None or parent(dense.first("config.init")) is not None:
            continue
        controls = []
        for start, name in ((dense, FINE_TUNE), (routed, routed.name)):
            candidates = _continued(results, group, start, name)
            controls.append(_like_tail(candidates, tail_group, tail))
        comparisons.append(Tail(group, dense, routed, tail, *controls))
    return comparisons


def _continued(
    results: Results, group: Group, start: Variant, name: str
) -> Iterator[tuple[Group, Variant]]:
    """Yield the variants of a name whose parents are the runs of `start`, with their group."""
    run = parent(start.first("run"))
    for candidate in results.groups:
        if candidate.metric != group.metric:
            continue
        for variant in candidate.variants:
            is_child = parent(variant.first("config.init")) in (run, f"{run}@{start.step:.0f}")
            same_reference = variant.first("reference") == start.first("reference")
            if variant.name == name and is_child and same_reference:
                yield candidate, variant


def _like_tail(
    candidates: Iterable[tuple[Group, Variant]], tail_group: Group, tail: Variant
) -> Variant | None:
    """Return the candidate that was trained on with the tail's configuration for as many steps."""
    for group, candidate in candidates:
        variant = candidate.at(tail.step)
        same_config = _config_without_parent(group) == _config_without_parent(tail_group)
        if variant.step == tail.step and same_config:
            return variant
    return None


def _config_without_parent(group: Group) -> str:
    return re.sub(r"config\.init=[^;]*", "", group.shared_config)
