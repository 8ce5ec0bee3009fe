"""The main table and the state of the art (TREAD, main table and Table 1)."""

from __future__ import annotations

from typing import Any

from analysis.runs.cells import Base, Cell, Study
from analysis.tables import paper
from analysis.tables.headings import PAIRED, difference, heading, paper_main, score
from analysis.tables.memorisation import Memory
from analysis.tables.table import (
    NOT_RUN,
    Column,
    Entry,
    Table,
    build,
    missing,
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
    for row in paper.rows("main"):
        if row["model"] not in seen:
            entries = [words(row["model"]), missing(), words(""), missing(), missing(), missing()]
            entries += memory.blank(2)
            rows.append((NOT_RUN, [*entries, *_paper_entries(row)]))
    return build(
        "main",
        "Main table: dense against routed, by backbone",
        columns,
        rows,
        notes("main", PAIRED, *memory.notes),
    )


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


def notes(table: str, *more: str) -> tuple[str, ...]:
    """Return a table's notes: ours, where the paper's numbers stand, what to know of them."""
    note = paper.table(table).attrs.get("note")
    return (*more, f"Paper: {paper.citation(table)}.", *([note] if note else []))


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
    table = build("sota", "State of the art and our runs", columns, rows, notes("sota"))
    has_ours = any(row.group.startswith("Ours") for row in table.rows)
    # The numbers of other people's rows share the columns: only ours make the table ours.
    return table if has_ours else _foreign(table)


def _foreign(table: Table) -> Table:
    columns = tuple(Column(c.label, c.numeric, c.better, published=True) for c in table.columns)
    return Table(table.name, table.title, columns, table.rows, table.notes)


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
