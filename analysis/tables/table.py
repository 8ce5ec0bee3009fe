"""What a table is: columns, rows of entries, notes; and how it reads in Markdown.

An entry is a text or a number with its spread, its n and its marks; nothing in it is escaped. Rows
are given as plain values (`Value`): their column knows how its numbers are written. Markdown is
made here, since notebooks show it; the other formats in `analysis.tables.render`.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, NamedTuple

from analysis.comparison.aggregation import ENOUGH_SEEDS, Estimate, half_width

MISSING = "missing"
FEW_NOTE = f"\u2020 fewer than {ENOUGH_SEEDS} seeds, or no more than half: under-replicated."
HALF_NOTE = "Mean over seeds \u00b1 half-width of its 95 % t-interval."
MISSING_NOTE = "missing: no finished run gives this number."
PAIRED = "Differences are paired by seed and step, with Student's 95 % interval."
# Group of the rows that only the paper has numbers for.
NOT_RUN = "Published only, not run here"
_MARKDOWN = str.maketrans({c: f"\\{c}" for c in "\\`*_{}[]<>#|~"})
_ARROWS = {"lower": " \u2193", "higher": " \u2191", None: ""}


@dataclass(frozen=True)
class Entry:
    """One cell of a table."""

    text: str = ""  # after the number, if there is one
    value: float | None = None
    std: float | None = None  # sample standard deviation over seeds
    low: float | None = None  # ends of a 95 % interval
    high: float | None = None
    n: int | None = None  # seeds; None: not ours to replicate (published, analytic)
    of: int | None = None  # seeds tried, where some may give no number (a target not reached)
    decimals: int = 2
    signed: bool = False  # a plus sign too (differences)
    unit: str = ""  # right after the number, such as `x`
    best: bool = False  # of its group
    published: bool = False  # a number of others, also in a column of ours
    half: float | None = None  # half of the width of the mean's 95 % interval

    @property
    def few(self) -> bool:
        """Whether too few seeds, or not most of those tried, give the number: no headline."""
        if self.value is None or self.n is None:
            return False
        return self.n < ENOUGH_SEEDS or 2 * self.n <= (self.of or 0)

    @property
    def seeds(self) -> str:
        """The seeds behind the number, `3`, or `3 of 5` where others gave none."""
        return f"{self.n}" if self.of in (None, self.n) else f"{self.n} of {self.of}"

    @property
    def is_missing(self) -> bool:
        """Whether a number should be here and is not."""
        return self.value is None and self.text == MISSING

    def number(self, value: float) -> str:
        """Return a number of this entry with its digits and sign."""
        return f"{value:{'+' if self.signed else ''}.{self.decimals}f}"


@dataclass(frozen=True)
class Column:
    """A column: heading, kind, which end is best, whose numbers."""

    label: str
    numeric: bool = True
    better: str | None = None
    published: bool = False
    decimals: int = 2
    unit: str = ""
    shown: bool = True  # else its entries are left out

    def entry(self, value: Value) -> Entry:
        """Return a value as an entry; an absent number is `missing` or `not published`."""
        if isinstance(value, Entry):
            return value
        if isinstance(value, str):
            return Entry(value)
        if self.published and (value is None or value != value):
            return published(None)
        return measured(value, self.decimals, self.unit)

    @classmethod
    def each(cls, *labels: str, **options: Any) -> tuple[Column, ...]:
        """Return columns that differ in their label alone."""
        return tuple(cls(label, **options) for label in labels)


# An entry is made from text, a number with or without seeds, or None (unknown).
Value = Entry | Estimate | str | float | None
# Heading of a row's group and the row's values.
RowValues = tuple[str, Sequence[Value]]


class Row(NamedTuple):
    """A row: its group's heading and an entry per column."""

    group: str
    entries: tuple[Entry, ...]


class Heading(str):
    """A group's heading; `mixed` where its rows took different steps, so that none is the best."""

    mixed = False


@dataclass(frozen=True, repr=False)
class Table:
    """A table with its notes."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def covered(self) -> bool:
        """Whether any number in it is of these runs."""
        for row in self.rows:
            for column, entry in zip(self.columns, row.entries, strict=True):
                if entry.value is not None and not (column.published or entry.published):
                    return True
        return False

    def only(self, indices: Sequence[int] | None = None, ours: bool = False) -> Table:
        """Return the table with some columns, without rows and notes that then say nothing.

        Args:
            indices: Columns by number; None is all.
            ours: Leave out rows that lack every number of these runs in these columns.
        """
        indices = range(len(self.columns)) if indices is None else indices
        columns = tuple(self.columns[index] for index in indices)
        rows = []
        for row in self.rows:
            entries = tuple(row.entries[index] for index in indices)
            if not (ours and _lacks_numbers(columns, entries)):
                rows.append(Row(row.group, entries))
        unused = {HALF_NOTE, FEW_NOTE, MISSING_NOTE}.difference(_mark_notes(rows))
        notes = tuple(note for note in self.notes if note not in unused)
        return replace(self, columns=columns, rows=tuple(rows), notes=notes)

    @property
    def groups(self) -> list[str]:
        """Headings in order."""
        return list(dict.fromkeys(row.group for row in self.rows))

    def __repr__(self) -> str:
        return f"{self.title}: {len(self.rows)} rows"

    def _repr_markdown_(self) -> str:
        return markdown(self)


def _lacks_numbers(columns: Sequence[Column], entries: Sequence[Entry]) -> bool:
    """Return whether numbers of these runs are missing and none is there."""
    any_missing = False
    for column, entry in zip(columns, entries, strict=True):
        if column.published or entry.published:
            continue
        if entry.value is not None:
            return False
        any_missing = any_missing or entry.is_missing
    return any_missing


def _mark_notes(rows: Iterable[Row]) -> list[str]:
    """Return the notes that explain the marks in the rows."""
    entries = list(itertools.chain.from_iterable(row.entries for row in rows))
    notes = []
    if any(entry.half is not None for entry in entries):
        notes.append(HALF_NOTE)
    if any(entry.few for entry in entries):
        notes.append(FEW_NOTE)
    if any(entry.is_missing for entry in entries):
        notes.append(MISSING_NOTE)
    return notes


def measured(
    value: Estimate | float | None, decimals: int = 2, unit: str = "", signed: bool = False
) -> Entry:
    """Return mean +- half-width (n), an interval's ends where the value has them, or `missing`."""
    if value is None or value != value:
        return Entry(MISSING)
    if not isinstance(value, Estimate):
        return Entry("", value, decimals=decimals, unit=unit, signed=signed)
    mean, n, std, low, high = astuple(value)
    std = std if low is None else None
    half = half_width(std, n) if std is not None else None
    options: dict[str, Any] = {"decimals": decimals, "unit": unit, "signed": signed}
    return Entry("", mean, std, low, high, n, half=half, **options)


def published(value: float | None, text: str = "", signed: bool = False) -> Entry:
    """Return a published number; None is `not published`."""
    if value is None or value != value:
        return Entry(text or "not published")
    return Entry(text, float(value), signed=signed, published=True)


def build(
    name: str, title: str, columns: Sequence[Column], rows: Sequence[RowValues],
    notes: Sequence[str] = (), not_run: Iterable[RowValues] = (("none run", ()),),
) -> Table:  # fmt: skip
    """Assemble a table, flag the best of each group and add the notes that its marks need.

    Without a row of our runs the table has those of `not_run`, each a name and the paper's values,
    and all other numbers are missing.
    """
    if not rows:
        rows = _unrun_rows(columns, not_run)
    entries = []
    for _, values in rows:
        pairs = zip(columns, values, strict=True)
        entries.append([column.entry(value) for column, value in pairs])
    headings = [heading for heading, _ in rows]
    for index, column in enumerate(columns):
        if column.better:
            _flag_best(headings, entries, index, column.better)
    full_rows = tuple(map(Row, headings, map(tuple, entries)))
    visible = [index for index, column in enumerate(columns) if column.shown]
    all_notes = (*notes, *_mark_notes(full_rows))
    return Table(name, title, tuple(columns), full_rows, all_notes).only(visible)


def _unrun_rows(columns: Sequence[Column], not_run: Iterable[RowValues]) -> list[RowValues]:
    rows: list[RowValues] = []
    for name, paper_values in not_run:
        blanks: list[Value] = []
        for column in columns[1 : len(columns) - len(paper_values)]:
            blanks.append(None if column.numeric or column.published else "")
        rows.append((NOT_RUN if paper_values else "", [name, *blanks, *paper_values]))
    return rows


def _flag_best(headings: list[str], rows: list[list[Entry]], index: int, better: str) -> None:
    """Flag the best entries of one column in each group; ties are all flagged.

    A group with one number has no best, nor has one whose rows cannot be compared (`mixed`), nor
    one whose best is under-replicated.
    """
    values: dict[str, list[float]] = {}
    for heading, row in zip(headings, rows, strict=True):
        value = row[index].value
        if value is not None and not getattr(heading, "mixed", False):
            values.setdefault(heading, []).append(value)
    for heading, row in zip(headings, rows, strict=True):
        group_values = values.get(heading, [])
        if len(group_values) > 1 and not row[index].few:
            best = min(group_values) if better == "lower" else max(group_values)
            if row[index].value == best:
                row[index] = replace(row[index], best=True)


# --- Markdown -------------------------------------------------------------------------------------


def markdown_escape(text: str) -> str:
    """Return `text` safe in a Markdown table cell (one line, no markup, no HTML)."""
    return " ".join(text.split()).replace("&", "&amp;").translate(_MARKDOWN)


def plain(entry: Entry) -> str:
    """Return an entry as text: `12.34 +- 0.52 (n=3)` (with the sign), `missing`."""
    if entry.value is None:
        return entry.text
    text = entry.number(entry.value) + entry.unit
    if entry.half is not None:
        text += f" \u00b1 {entry.half:.{entry.decimals}f}"
    if entry.low is not None and entry.high is not None:
        text += f" [{entry.number(entry.low)}, {entry.number(entry.high)}]"
    if entry.n is not None:
        text += f" (n={entry.seeds})"
    if entry.few:
        text += "\u2020"
    return f"{text} {entry.text}".rstrip()


def head(column: Column) -> str:
    """Return a column's heading with an arrow to its better end."""
    return column.label + _ARROWS[column.better]


def markdown(table: Table) -> str:
    """Return the table as GitHub-flavoured Markdown with title and notes."""
    heads = [markdown_escape(head(column)) for column in table.columns]
    lines = []
    for heading, rows in itertools.groupby(table.rows, key=lambda row: row.group):
        if heading:
            blanks = [""] * (len(table.columns) - 1)
            lines.append([f"**{markdown_escape(heading)}**", *blanks])
        for row in rows:
            lines.append(list(map(_markdown_entry, row.entries)))
    numeric = [index for index, column in enumerate(table.columns) if column.numeric]
    text = f"### {markdown_escape(table.title)}\n\n{markdown_rows(heads, lines, numeric)}\n"
    for note in table.notes:
        text += f"- {markdown_escape(note)}\n"
    return text.rstrip() + "\n"


def markdown_rows(
    heads: Sequence[str], rows: Iterable[Sequence[str]], numeric: Collection[int] = ()
) -> str:
    """Return a Markdown table of texts that are safe already; numeric columns, by index, right.

    pandas writes Markdown only with the package tabulate, which nothing else here needs.
    """
    rules = ["---:" if index in numeric else ":---" for index in range(len(heads))]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (heads, rules, *rows))


def _markdown_entry(entry: Entry) -> str:
    text = markdown_escape(plain(entry))
    return f"**{text}**" if entry.best else text
