"""What a table is, columns, rows of entries and notes, how it reads, and entries of our runs.

An entry is a word or a number with its spread, its n and its marks; nothing in it is escaped. Rows
are given as plain values (`Value`): their column knows how numbers of it are written.
Markdown is made here, since notebooks show it; the other formats in `analysis.tables.render`.

A distance that was bought by copying is worth nothing, so the NN-distance ratio stands beside the
score (metrics store it as `memorisation`): the mean distance of samples to their nearest training
image over that to their nearest held-out one. Lower values indicate copying, 0 exact copies. The
two sets differ in size, so images that were never seen do not get exactly 1; what they get stands
in the note.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, NamedTuple

from analysis.runs.cells import Base, Cell, Study
from analysis.runs.seed_statistics import ENOUGH_SEEDS, Estimate, paired
from analysis.tables import paper

MISSING = "missing"
FEW_NOTE = f"\u2020 fewer than {ENOUGH_SEEDS} seeds, or no more than half: under-replicated."
MISSING_NOTE = "missing: no finished run gives this number."
PAIRED = "Differences are paired by seed and step, with Student's 95 % interval."
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
    shown: bool = True  # else its entries are left out

    def entry(self, value: Value) -> Entry:
        """Return a value as an entry; no number is `missing`, of others' columns not published."""
        if isinstance(value, Entry):
            return value
        if isinstance(value, str):
            return Entry(value)
        if self.published and (value is None or value != value):
            return published(None)
        return ours(value, self.decimals, self.unit)

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
        columns, rows = tuple(self.columns[place] for place in places), []
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


def ours(
    found: Estimate | float | None, decimals: int = 2, unit: str = "", signed: bool = False
) -> Entry:
    """Return mean +- std (n), an interval instead of std where there is one, or `missing`."""
    if found is None or found != found:
        return Entry(MISSING)
    if not isinstance(found, Estimate):
        return Entry("", found, decimals=decimals, unit=unit, signed=signed)
    mean, n, std, low, high = astuple(found)
    std = std if low is None else None
    return Entry("", mean, std, low, high, n, decimals=decimals, unit=unit, signed=signed)


def published(value: float | None, text: str = "", signed: bool = False) -> Entry:
    """Return a published number; None is `not published`."""
    if value is None or value != value:
        return Entry(text or "not published")
    return Entry(text, float(value), signed=signed)


def build(
    name: str, title: str, columns: Sequence[Column], rows: Sequence[tuple[str, Sequence[Value]]],
    notes: Sequence[str] = (), unrun: Iterable[tuple[str, Sequence[Value]]] = (("none run", ()),),
) -> Table:  # fmt: skip
    """Assemble a table, flag the best of each group and add the notes that its marks need.

    A group with one number has no best, nor has one whose rows cannot be compared (`mixed`), nor
    one whose best is under-replicated. Ties are all flagged. Without a row of ours those of `unrun`
    stand there, each its name and the paper's values, and all other numbers are missing.
    """
    for first, theirs in () if rows else unrun:
        own = columns[1 : len(columns) - len(theirs)]
        blank = [None if column.numeric or column.published else "" for column in own]
        rows = [*rows, (NOT_RUN if theirs else "", [first, *blank, *theirs])]
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
    kept = [place for place, column in enumerate(columns) if column.shown]
    notes = (*notes, *_mark_notes(made))
    return Table(name, title, tuple(columns), tuple(made), notes).only(kept)


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
    for group, rows in itertools.groupby(table.rows, key=lambda row: row.group):
        if group:
            cells = [f"**{markdown_escape(group)}**", *[""] * (len(table.columns) - 1)]
            lines.append("| " + " | ".join(cells) + " |")
        for row in rows:
            texts = [markdown_escape(plain(entry)) for entry in row.entries]
            texts = [f"**{t}**" if e.best else t for t, e in zip(texts, row.entries, strict=True)]
            lines.append("| " + " | ".join(texts) + " |")
    lines += ["", *(f"- {markdown_escape(note)}" for note in table.notes)]
    return "\n".join(lines).rstrip() + "\n"


# --- headings and entries of our runs -------------------------------------------------------------


def metric_label(metric: str) -> str:
    """Return a metric's name as tables and figures show it.

    Records keep the name `memorisation` for what is a ratio of nearest-neighbour distances.
    """
    if metric.startswith("memorisation"):
        return "NN-distance ratio" + metric.removeprefix("memorisation")
    return metric


def metric_better(about: Mapping[str, Any]) -> str | None:
    """Return the better end of a metric from what is known of it; None where neither end is.

    A higher NN-distance ratio is no better: low values warn of copying, and that is all.
    """
    return None if str(about.get("key")).startswith("memorisation") else about.get("better")


def metric_decimals(metric: str) -> int:
    """Return a metric's digits: distances two, shares three, losses four, squared MMD five."""
    shares = ("accuracy", "precision", "recall", "memorisation", "adherence", "w_eff")
    digits = {("kd", "kid"): 5, ("heldout",): 4, shares: 3}
    return next((n for names, n in digits.items() if metric.lower().startswith(names)), 2)


class Heading(str):
    """A group's heading."""

    mixed = False  # its rows took different numbers of steps: none of them is the best


def heading(base: Base, *cells: Cell | None, tail: str = "", what: str = "") -> Heading:
    """Return a group's heading: what its runs share, the metric (or `what`), guidance, steps.

    The steps are those of the cells that the table shows, by default all of the group's.
    """
    guidance = base.any.first("guidance")
    # A plain pass has a scale of 1 by definition.
    protocol = f", guidance {'none' if guidance == 'none scale=1.0' else guidance}"
    shown = [cell for cell in cells if cell is not None] or list(base.cells)
    label = f"{base.label}: {what or metric_label(base.metric)}{protocol if guidance else ''}"
    made = Heading(f"{label}{after(shown)}{tail}")
    made.mixed = len({cell.steps for cell in shown}) > 1
    return made


def after(cells: Sequence[Cell]) -> str:
    """Return the steps after which cells are read, `, after 400 steps (4-8: 600)`."""
    texts = {cell.treatment: steps(cell) for cell in cells}
    usual, _ = collections.Counter(f"{cell.steps:.0f}" for cell in cells).most_common(1)[0]
    others = [f"{name}: {text}" for name, text in texts.items() if text != usual]
    return f", after {usual} steps" + (f" ({'; '.join(others)})" if others else "")


def steps(cell: Cell) -> str:
    """Return the number of steps behind a cell's scores, and those of seeds that are left out."""
    odd = f", without the seeds of {', '.join(map(str, cell.odd_steps))}" if cell.odd_steps else ""
    return f"{cell.steps:.0f}{odd}"


def better_end(study: Study) -> str | None:
    """Return the better end of the metric that a study is read by; None where bases differ."""
    ends = {metric_better({"better": "lower", **base.known[base.metric]}) for base in study.bases}
    return ends.pop() if len(ends) == 1 else ("lower" if not ends else None)


def score(metric: str, cell: Cell | None) -> Entry:
    """Return a cell's score by a metric."""
    return ours(cell.estimate(f"score.{metric}") if cell else None, metric_decimals(metric))


def difference(metric: str, cell: Cell | None, baseline: Cell | None) -> Entry:
    """Return a cell's score minus the baseline's as `gap` does; the baseline's own is empty."""
    if cell is not None and cell is baseline:
        return Entry()
    return ours(gap(cell, baseline, f"score.{metric}"), metric_decimals(metric), signed=True)


def gap(cell: Cell | None, baseline: Cell | None, column: str) -> Estimate | None:
    """Return a cell's column minus the baseline's after the same steps, paired by seed."""
    if cell is None or baseline is None:
        return None
    return paired(baseline.by_seed(column, cell.steps), cell.by_seed(column))


def paper_notes(table: str, *ours: str) -> tuple[str, ...]:
    """Return a table's notes: ours, where the paper's numbers stand, what to know of them."""
    note = paper.table(table).attrs.get("note")
    return (*ours, f"Paper: {paper.citation(table)}.", *([note] if note else []))


def memory_columns(study: Study, *labels: str) -> tuple[Column, ...]:
    """Return a column per label, not shown where no run was scored."""
    shown = any(base.memory for base in study.bases)
    return Column.each(*labels, decimals=3, shown=shown)


def memory(base: Base, *cells: Cell | None) -> list[Value]:
    """Return each cell's NN-distance ratio; endless data has no training set: never missing."""
    if base.memory is None:
        return [Entry("not scored") for _ in cells]
    return [cell.estimate(f"score.{base.memory}") if cell else None for cell in cells]


def scores(base: Base, cell: Cell | None) -> list[Value]:
    """Return a cell's score, its difference to the dense one, and its NN-distance ratio."""
    change = difference(base.metric, cell, base.dense)
    return [score(base.metric, cell), change, *memory(base, cell)]


def memory_notes(study: Study) -> tuple[str, ...]:
    """Say what the NN-distance ratio means, and what unseen images get; nothing without."""
    scored = [(base, base.known[name], name) for base in study.bases if (name := base.memory)]
    if not scored:
        return ()
    known = {"memorisation_pixels": "pixels", "memorisation": "the score's features"}
    spaces = " or ".join(sorted({known[about["key"]] for _, about, _ in scored}))
    note = (
        "NN-distance ratio (train / held-out): distance to the nearest training image over that "
        f"to the nearest held-out one, in {spaces}; lower values indicate copying, 0 exact copies."
    )
    fresh = []
    for base, about, name in scored:
        wanted = [f"{about['key']}_heldout", about.get("features"), about.get("n")]
        for other, its in base.known.items():
            if [its.get(key) for key in ("key", "features", "n")] == wanted:
                found = (cell.estimate(f"score.{other}") for cell in base.cells)
                if mean := next((known.mean for known in found if known), None):
                    fresh.append(f"{mean:.3f} on {base.any.first('data')} ({metric_label(name)})")
                    break
    said = ", ".join(dict.fromkeys(fresh))
    return (note, f"Images that were never seen get {said}.") if said else (note,)
