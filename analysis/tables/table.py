"""What a table is, columns, rows of entries and notes, and how it reads as Markdown.

An entry is a word or a number with its spread, its n and its marks; nothing in it is escaped. Rows
are given as plain values (`Value`): their column knows how numbers of it are written.
Markdown is made here, since notebooks show it; the other formats in `analysis.tables.render`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, NamedTuple

from analysis.runs.seed_statistics import ENOUGH_SEEDS, Estimate

MISSING = "missing"
FEW_NOTE = f"\u2020 fewer than {ENOUGH_SEEDS} seeds, or no more than half: under-replicated."
MISSING_NOTE = "missing: no finished run gives this number."
# Group of the rows that only the paper has numbers for.
NOT_RUN = "Of the paper, not run here"
_MARKDOWN = str.maketrans({c: f"\\{c}" for c in "\\`*_{}[]<>#|~"})


@dataclass(frozen=True)
class Entry:
    """One cell of a table."""

    text: str = ""  # beside a number it stands after it
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
        """Whether a number should stand here and does not."""
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

    def entry(self, value: Value) -> Entry:
        """Return a value as an entry; no number is `missing`, of others' columns not published."""
        if isinstance(value, Entry):
            return value
        if isinstance(value, str):
            return Entry(value)
        if isinstance(value, Estimate):
            return ours(value, self.decimals, self.unit)
        if value is None or value != value:
            return published(None) if self.published else ours(None)
        return Entry("", value, decimals=self.decimals, unit=self.unit)

    @classmethod
    def each(cls, *labels: str, **kind: Any) -> tuple[Column, ...]:
        """Return columns of one kind."""
        return tuple(cls(label, **kind) for label in labels)


# What a cell is given as: text, a number with or without seeds, or None for one that is not known.
Value = Entry | Estimate | str | float | None


class Row(NamedTuple):
    """A row: its group's heading and an entry per column."""

    group: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True, repr=False)
class Table:
    """A table with what must be said about it."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def covered(self) -> bool:
        """Whether any of our own numbers stands in it."""
        return any(
            entry.value is not None and not column.published
            for row in self.rows
            for column, entry in zip(self.columns, row.entries, strict=True)
        )

    def only(self, places: Sequence[int] | None = None, ours: bool = False) -> Table:
        """Return the table with some columns, without rows and notes that then say nothing.

        Args:
            places: Columns by number; None is all.
            ours: Leave out rows that miss every number of ours in these columns.
        """
        places = range(len(self.columns)) if places is None else places
        columns = tuple(self.columns[place] for place in places)
        rows = []
        for row in self.rows:
            entries = tuple(row.entries[place] for place in places)
            own = [e for c, e in zip(columns, entries, strict=True) if not c.published]
            empty = any(e.is_missing for e in own) and all(e.value is None for e in own)
            if not (ours and empty):
                rows.append(Row(row.group, entries))
        idle = {FEW_NOTE, MISSING_NOTE}.difference(_mark_notes(rows))
        notes = tuple(note for note in self.notes if note not in idle)
        return replace(self, columns=columns, rows=tuple(rows), notes=notes)

    @property
    def groups(self) -> list[str]:
        """Headings in order."""
        return list(dict.fromkeys(row.group for row in self.rows))

    def __repr__(self) -> str:
        return f"{self.title}: {len(self.rows)} rows"

    def _repr_markdown_(self) -> str:
        return markdown(self)


def _mark_notes(rows: Sequence[Row]) -> list[str]:
    entries = [entry for row in rows for entry in row.entries]
    few = [FEW_NOTE] if any(entry.few for entry in entries) else []
    return few + ([MISSING_NOTE] if any(entry.is_missing for entry in entries) else [])


def ours(found: Estimate | None, decimals: int = 2, unit: str = "", signed: bool = False) -> Entry:
    """Return mean +- std (n), an interval instead of std where there is one, or `missing`."""
    if found is None:
        return Entry(MISSING)
    mean, n, std, low, high = astuple(found)
    std = std if low is None else None
    return Entry("", mean, std, low, high, n, decimals=decimals, unit=unit, signed=signed)


def published(
    value: float | None, decimals: int = 2, signed: bool = False, text: str = ""
) -> Entry:
    """Return a published number; None is `not published`."""
    if value is None or value != value:
        return Entry(text=text or "not published")
    return Entry(text, float(value), decimals=decimals, signed=signed)


def build(
    name: str, title: str, columns: Sequence[Column], rows: Sequence[tuple[str, Sequence[Value]]],
    notes: Sequence[str] = (), unrun: Iterable[tuple[str, Sequence[Value]]] = (("none run", ()),),
) -> Table:  # fmt: skip
    """Assemble a table, flag the best of each group and add the notes that its marks need.

    A group with one number has no best, nor has one whose rows cannot be compared (`mixed`), nor
    one whose best is under-replicated. Ties are all flagged. Without a row of ours those of `unrun`
    stand there, each its name and the paper's values, and all other numbers are missing.
    """
    for first, paper in () if rows else unrun:
        own = columns[1 : len(columns) - len(paper)]
        blank = [None if column.numeric or column.published else "" for column in own]
        rows = [*rows, (NOT_RUN if paper else "", [first, *blank, *paper])]
    entries = [[c.entry(v) for c, v in zip(columns, own, strict=True)] for _, own in rows]
    groups: dict[str, list[list[Entry]]] = {}
    for (group, _), row in zip(rows, entries, strict=True):
        if not getattr(group, "mixed", False):
            groups.setdefault(group, []).append(row)
    for place, column in enumerate(columns):
        for rivals in groups.values() if column.better else ():
            known = [v for row in rivals if (v := row[place].value) is not None]
            best = (min if column.better == "lower" else max)(known, default=None)
            for row in rivals if len(known) > 1 else ():
                if row[place].value == best and not row[place].few:
                    row[place] = replace(row[place], best=True)
    made = [Row(group, tuple(row)) for (group, _), row in zip(rows, entries, strict=True)]
    return Table(name, title, tuple(columns), tuple(made), (*notes, *_mark_notes(made)))


def markdown_escape(text: str) -> str:
    """Return `text` safe in a Markdown table cell (one line, no markup, no HTML)."""
    return " ".join(text.split()).replace("&", "&amp;").translate(_MARKDOWN)


def plain(entry: Entry) -> str:
    """Return an entry as text: `12.34 +- 0.21 (n=3)` (with the sign), `missing`."""
    if entry.value is None:
        return entry.text
    text = entry.number(entry.value) + entry.unit
    if entry.std is not None:
        text += f" \u00b1 {entry.std:.{entry.decimals}f}"
    if entry.low is not None and entry.high is not None:
        text += f" [{entry.number(entry.low)}, {entry.number(entry.high)}]"
    if entry.n is not None:
        text += f" (n={entry.seeds})"
    if entry.few:
        text += "\u2020"
    return f"{text} {entry.text}".rstrip()


def head(column: Column) -> str:
    """Return a column's heading with an arrow to its better end."""
    return column.label + {"lower": " \u2193", "higher": " \u2191", None: ""}[column.better]


def markdown(table: Table) -> str:
    """Return the table as GitHub-flavoured Markdown with title and notes."""
    lines = [f"### {markdown_escape(table.title)}", ""]
    lines.append("| " + " | ".join(markdown_escape(head(c)) for c in table.columns) + " |")
    lines.append("|" + "|".join(" ---: " if c.numeric else " :--- " for c in table.columns) + "|")
    group = None
    for row in table.rows:
        if row.group and row.group != group:
            group = row.group
            cells = [f"**{markdown_escape(group)}**", *[""] * (len(table.columns) - 1)]
            lines.append("| " + " | ".join(cells) + " |")
        texts = [markdown_escape(plain(entry)) for entry in row.entries]
        texts = [f"**{t}**" if e.best else t for t, e in zip(texts, row.entries, strict=True)]
        lines.append("| " + " | ".join(texts) + " |")
    lines += ["", *(f"- {markdown_escape(note)}" for note in table.notes)]
    return "\n".join(lines).rstrip() + "\n"
