"""All architectures: the main table, the state of the art, every score and every difference."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from analysis.runs.cells import Base, Cell, Study
from analysis.runs.statistics import Estimate
from analysis.tables import paper
from analysis.tables.score_entries import (
    PAIRED,
    Memory,
    difference,
    gap,
    heading,
    metric_decimals,
    paper_main,
    paper_notes,
    score,
    steps,
)
from analysis.tables.table import (
    NOT_RUN,
    Column,
    Entry,
    Table,
    build,
    missing,
    not_run,
    ours,
    published,
    words,
)


def main(study: Study) -> Table:
    """Dense, routed, and their difference per backbone, beside the paper's (main table)."""
    memory = Memory.of(study)
    columns = (
        Column("Model", numeric=False),
        Column("Params (M)"),
        Column("Route", numeric=False),
        Column("Dense"),
        Column("+ TREAD"),
        Column("\u0394"),
        *memory.columns("Memorisation, dense", "Memorisation, + TREAD"),
        Column("Paper model", numeric=False, published=True),
        Column("Paper dense", published=True),
        Column("Paper + TREAD", published=True),
        Column("Paper \u0394", published=True),
    )
    rows: list[tuple[str, list[Entry]]] = [
        (heading(base, *base.pair()), _main_row(base, memory)) for base in study.bases
    ]
    seen = {str(row["model"]) for base in study.bases if (row := paper_main(base))}
    rows += [
        not_run(columns, _paper_entries(row), row["model"], NOT_RUN)
        for row in paper.rows("main")
        if row["model"] not in seen
    ]
    title = "Main table: dense against routed, by backbone"
    return build("main", title, columns, rows, paper_notes("main", PAIRED, *memory.notes))


def _main_row(base: Base, memory: Memory) -> list[Entry]:
    dense, routed = base.pair()
    params = base.any.first("params")
    row = paper_main(base)
    name = f"{base.any.first('backbone')}-{base.any.first('size')}"
    entries = [
        words(name),
        Entry(value=params / 1e6, decimals=2) if params else missing(),
        words(routed.treatment if routed else "none run"),
        score(base, dense),
        score(base, routed),
        difference(base, routed, dense),
        *memory.entries(base, dense, routed),
    ]
    return [*entries, *(_paper_entries(row) if row else [words("none"), *[published(None)] * 3])]


def _paper_entries(row: dict[str, Any]) -> list[Entry]:
    mark = row.get("mark")
    name = f"{row['model']}, {int(row['iterations']) // 1000}K steps"
    if isinstance(mark, str):
        name += f" ({mark})"
    numbers = [published(row[key]) for key in ("dense", "tread")]
    return [words(name), *numbers, published(-float(row["delta"]), signed=True)]


_SOTA = (
    ("FID", "fid", "fd", 2),
    ("sFID", "sfid", "sfid", 2),
    ("IS", "is", "is", 2),
    ("Precision", "precision", "precision", 2),
    ("Recall", "recall", "recall", 2),
)
_HIGHER = {"is", "precision", "recall"}


def sota(study: Study) -> Table:
    """The state-of-the-art table, with our runs below in their own groups (Table 1)."""
    columns = [Column("Method", numeric=False), Column("Epochs or steps", numeric=False)]
    columns += [
        Column(label, better="higher" if key in _HIGHER else "lower") for label, key, _, _ in _SOTA
    ]
    rows = []
    for row in paper.rows("sota"):
        group = "Paper, guided" if row["guided"] else "Paper, unguided"
        numbers = [published(row[key], digits) for _, key, _, digits in _SOTA]
        rows.append((group, [words(row["method"]), words(f"{row['epochs']} epochs"), *numbers]))
    known = study.runs.attrs.get("metrics", {})
    for base in study.bases:
        names = {v["key"]: name for name, v in known.items() if f"score.{name}" in base.any.runs}
        shown = base.pair()
        head = f"Ours: {heading(base, *shown)}"
        rows += [(head, _sota_row(cell, names, base.metric)) for cell in shown if cell is not None]
    if not any(group.startswith("Ours") for group, _ in rows):
        # The numbers of other people's rows share the columns: only ours make the table ours.
        columns = [dataclasses.replace(column, published=True) for column in columns]
    return build("sota", "State of the art and our runs", columns, rows, paper_notes("sota"))


def _sota_row(cell: Cell, names: dict[str, str], metric: str) -> list[Entry]:
    numbers = []
    for _, _, key, digits in _SOTA:
        name = metric if key == "fd" else names.get(key)
        estimate = cell.estimate(f"score.{name}") if name else None
        numbers.append(ours(estimate, digits if key not in ("precision", "recall") else 3))
    return [
        words(f"{cell.first('backbone')}-{cell.first('size')}, {cell.treatment}"),
        words(f"{cell.steps:.0f} steps"),
        *numbers,
    ]


def _metrics(study: Study) -> dict[str, str | None]:
    known = study.runs.attrs.get("metrics", {})
    return {
        name: about.get("better")
        for name, about in known.items()
        # What held-out images get themselves is no score of a run: it stands in a note.
        if f"score.{name}" in study.runs and not str(about.get("key")).endswith("_heldout")
    }


def all_scores(study: Study) -> Table:
    """Every treatment's every score, mean and standard deviation over seeds."""
    columns = [Column(name, better=better) for name, better in _metrics(study).items()]
    cells = [(base, cell, cell.estimate) for base in study.bases for cell in base.cells]
    return _every_metric(study, "all_scores", "Every score", columns, cells, Memory.of(study).notes)


def _every_metric(
    study: Study,
    name: str,
    title: str,
    columns: Sequence[Column],
    cells: Sequence[tuple[Base, Cell, Callable[[str], Estimate | None]]],
    notes: Sequence[str],
    signed: bool = False,
) -> Table:
    """Build a table of a row per cell and a column per metric, an estimate of its scores."""
    rows = []
    for base, cell, estimate in cells:
        about = base.any
        head = f"{base.label}; guidance {about.first('guidance')}, sampler {about.first('sampler')}"
        entries = [words(cell.treatment), words(steps(cell))]
        for metric in _metrics(study):
            found = estimate(f"score.{metric}")
            entries.append(ours(found, metric_decimals(metric), signed=signed))
        rows.append((head, entries))
    both = [Column("Tokens", numeric=False), Column("Steps", numeric=False), *columns]
    return build(name, title, both, rows or [not_run(both)], notes)


def differences(study: Study) -> Table:
    """Every treatment's difference to the dense runs, paired by seed, with 95 % intervals."""
    columns = [Column(f"\u0394 {name}") for name in _metrics(study)]
    cells = [
        (base, cell, functools.partial(gap, cell, base.dense))
        for base in study.bases
        for cell in base.routed
    ]
    title = "Differences to dense, paired by seed and step"
    return _every_metric(study, "differences", title, columns, cells, (PAIRED,), signed=True)


def followups(study: Study) -> Table:
    """What others measured with token routing."""
    columns = (
        Column("Method", numeric=False),
        Column("FID", better="lower", published=True),
        Column("Batches/s", better="higher", published=True),
    )
    rows = [
        (
            f"{row['setup']} ({row['source']})",
            [words(row["method"]), published(row["fid"]), published(row["batches_per_s"])],
        )
        for row in paper.rows("followups")
    ]
    note = "Each project's own protocol: compare within a group only."
    return build("followups", "What others measured", columns, rows, (note,))
