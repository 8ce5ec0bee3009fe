"""The main table, the state of the art and what others measured (TREAD, main table and Table 1)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from analysis.comparison.aggregation import ENOUGH_SEEDS
from analysis.comparison.groups import Group, Variant
from analysis.comparison.pair_penalty import PairPenalty, pair_penalty
from analysis.comparison.results import Results
from analysis.tables import entries, paper
from analysis.tables.table import (
    NOT_RUN,
    PAIRED,
    Column,
    Entry,
    RowValues,
    Table,
    Value,
    build,
    head,
    measured,
    published,
)

# Kinds of scores that are read together, in this order (`experiments.options.evaluation.METRICS`).
_KINDS = (
    "fd", "precision", "recall", "accuracy", "adherence", "memorisation", "heldout_loss",
    "heldout_loss_routed", "w_eff", "w_eff_plain",
)  # fmt: skip


_PENALTY = (
    "s: training steps that the routed runs need for the dense runs' held-out loss after N steps, "
    "over N; m: multiply-adds of a routed step over a dense one; below s\u00b7m = 1 routing costs "
    "less. N is the latest scored step whose loss every routed seed reaches; seeds that do not "
    "reach it later are censored, never dropped."
)


def score_set(group: Group) -> dict[str, dict[str, Any]]:
    """Return the metrics that a group's scores are read together with, its own first.

    Those in the feature space of its own metric stand before those in others; the NN-distance
    ratio (`memorisation`), which says the same in each, appears once.
    """
    ranks = {group.metric: -1}
    for name, metric in group.metrics.items():
        kind = "memorisation" if name == group.nn_ratio else metric.get("key")
        if kind in _KINDS and (kind != "memorisation" or name == group.nn_ratio):
            ranks.setdefault(name, _KINDS.index(kind))
    names = sorted(ranks, key=ranks.__getitem__)
    return {name: group.known_metrics[name] for name in names}


def main(results: Results) -> Table:
    """Dense, routed, and their difference per backbone, a row per metric (main table)."""
    rows: list[RowValues] = []
    unpaired, has_penalty, has_paper = 0, False, False
    for group in results.groups:
        dense, routed = group.pair()
        if (dense is None or routed is None) and not results.every_group:
            unpaired += 1
            continue
        params = group.first("params")
        content = f"{params / 1e6:.2f}M parameters, " if params else ""
        content += f"route {routed.name}" if routed else "no route was run"
        heading = entries.heading(group, dense, routed, content=content)
        penalty = pair_penalty(results, group, dense, routed) if dense and routed else None
        # Fewer seeds give no interval and are shown in the figure only.
        if penalty is not None and len(penalty.last_steps) < ENOUGH_SEEDS:
            penalty = None
        for metric, meaning in score_set(group).items():
            change = entries.difference(metric, routed, dense)
            values = metric_row(group, metric, (dense, routed), [change])
            # The penalty is computed from the held-out loss: it is shown in that row.
            shown = penalty if meaning.get("key") == "heldout_loss" else None
            has_penalty = has_penalty or shown is not None
            rows.append((heading, [*values, *_penalty_entries(shown)]))
        family, objective, size = group.backbone, group.first("objective"), group.first("size")
        published_row = paper.main_row(family, objective, size)
        if published_row and paper.matches(group, "main"):
            has_paper = True
            rows.append((heading, [*_paper_row(published_row), Entry(), Entry()]))
    columns = Column.each("Dense", "+ TREAD", "\u0394")
    if not rows:
        has_paper = True
        rows = [(NOT_RUN, [*_paper_row(row), Entry(), Entry()]) for row in paper.rows("main")]
    columns += Column.each("s", "s\u00b7m", shown=has_penalty)
    notes = (PAIRED, *entries.nn_ratio_notes(results))
    notes = entries.paper_notes("main", *notes, shown=has_paper)
    if has_penalty:
        notes = (*notes, _PENALTY)
    if unpaired:
        text = f"Settings without both dense and routed runs: {unpaired}, left out (--all)."
        notes = (text, *notes)
    title = "Main table: dense against routed, by backbone"
    return build("main", title, (Column("Metric", numeric=False), *columns), rows, notes)


def _penalty_entries(pair: PairPenalty | None) -> list[Entry]:
    """Return s and s * m after N steps, or why they have no mean; empty without a penalty."""
    if pair is None:
        return [Entry(), Entry()]
    if pair.penalty.censored:
        return [Entry(pair.penalty.censored_text), Entry(pair.penalty.censored_text)]
    estimates = measured(pair.penalty.s), measured(pair.penalty.sm)
    text = f"at N={pair.step:.0f}"
    return [replace(entry, text=text) for entry in estimates]


def metric_row(
    group: Group, metric: str, variants: Sequence[Variant | None], changes: Sequence[Entry]
) -> list[Value]:
    """Return a metric's row: the score of each variant, then differences."""
    meaning = group.known_metrics[metric]
    label = Column(entries.metric_label(metric), better=entries.metric_better(meaning))
    row: list[Value] = [head(label)]
    for entry in (*(entries.score(metric, variant) for variant in variants), *changes):
        # A dense run has no routed pass to score.
        no_pass = meaning.get("key") == "heldout_loss_routed" and entry.is_missing
        row.append(Entry() if no_pass else entry)
    return row


def _paper_row(row: dict[str, Any]) -> list[Value]:
    """Return the paper's row: its model, its scores and their difference."""
    name = f"Paper, FID-50K: {row['model']}, {int(row['iterations']) // 1000}K steps"
    if isinstance(row.get("mark"), str):
        name += f" ({row['mark']})"
    change = published(-float(row["delta"]), signed=True)
    return [name, published(row["dense"]), published(row["tread"]), change]


# Columns of Table 1 by our kind of score: heading, the paper's key and the better end.
_SOTA = {
    "fd": ("FID", "fid", "lower"),
    "sfid": ("sFID", "sfid", "lower"),
    "is": ("IS", "is", "higher"),
    "precision": ("Precision", "precision", "higher"),
    "recall": ("Recall", "recall", "higher"),
}


def sota(results: Results) -> Table:
    """The state-of-the-art table, with our runs below in their own groups (Table 1)."""
    rows: list[RowValues] = []
    groups = results.groups
    has_paper = not groups or any(paper.matches(group, "sota") for group in groups)
    for row in paper.rows("sota") if has_paper else ():
        heading = "Paper, guided" if row["guided"] else "Paper, unguided"
        numbers = [published(row[key]) for _, key, _ in _SOTA.values()]
        rows.append((heading, [row["method"], f"{row['epochs']} epochs", *numbers]))
    for group in groups:
        pair = list(filter(None, group.pair()))
        for variant in pair:
            values: list[Value] = [f"{group.model}, {variant.name}", f"{variant.step:.0f} steps"]
            for kind in _SOTA:
                metric = group.metric_of_kind(kind)
                estimate = variant.estimate(metric) if metric else None
                values.append(measured(estimate, entries.metric_decimals(kind)))
            rows.append((f"Ours: {entries.heading(group, *pair)}", values))
    columns = list(Column.each("Method", "Epochs or steps", numeric=False))
    for name, _, better in _SOTA.values():
        columns.append(Column(name, better=better))
    notes = entries.paper_notes("sota", shown=has_paper)
    return build("sota", "State of the art and our runs", columns, rows, notes)


def followups(results: Results) -> Table:
    """What others measured with token routing."""
    columns = (
        Column("Method", numeric=False),
        Column("FID", better="lower", published=True),
        *Column.each("Precision", "Recall", better="higher", published=True, decimals=3),
        Column("Batches/s", better="higher", published=True),
    )
    rows: list[RowValues] = []
    for row in paper.rows("followups"):
        values = [row[key] for key in ("method", "fid", "precision", "recall", "batches_per_s")]
        rows.append((f"{row['setup']} ({row['source']})", values))
    note = "Each project's own protocol: compare within a group only."
    return build("followups", "What others measured", columns, rows, (note,))
