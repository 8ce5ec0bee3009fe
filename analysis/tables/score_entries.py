"""Headings and entries that tables share: score, difference, memorisation, the paper's place.

A distance that was bought by copying is worth nothing, so memorisation stands beside the score: the
mean distance of samples to their nearest training image over that to their nearest held-out one, 0
for copies of the training set. The two sets differ in size, so images that were never seen do not
get exactly 1; what they get stands in the note.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from analysis.runs.cells import Base, Cell, Study
from analysis.runs.seed_statistics import Estimate, paired
from analysis.tables import paper
from analysis.tables.table import Column, Entry, ours

# Hours of two machines say nothing about routing.
OTHER_MACHINE = Entry("other machine")
PAIRED = "Differences are paired by seed and step, with Student's 95 % interval."
_DECIMALS = 3


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
    label = f"{base.label}: {what or base.metric}{protocol if guidance else ''}"
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
    ends = {base.better for base in study.bases}
    return ends.pop() if len(ends) == 1 else ("lower" if not ends else None)


def score(base: Base, cell: Cell | None) -> Entry:
    """Return a cell's score."""
    return ours(cell.estimate(base.score) if cell else None, metric_decimals(base.metric))


def difference(base: Base, cell: Cell | None, baseline: Cell | None) -> Entry:
    """Return a cell's score minus the baseline's as `gap` does; the baseline's own is empty."""
    if cell is not None and cell is baseline:
        return Entry()
    return ours(gap(cell, baseline, base.score), metric_decimals(base.metric), signed=True)


def gap(cell: Cell | None, baseline: Cell | None, column: str) -> Estimate | None:
    """Return a cell's column minus the baseline's after the same steps, paired by seed."""
    if cell is None or baseline is None:
        return None
    return paired(baseline.by_seed(column, cell.steps), cell.by_seed(column))


def paper_notes(table: str, *ours: str) -> tuple[str, ...]:
    """Return a table's notes: ours, where the paper's numbers stand, what to know of them."""
    note = paper.table(table).attrs.get("note")
    return (*ours, f"Paper: {paper.citation(table)}.", *([note] if note else []))


@dataclass(frozen=True)
class Memory:
    """Which memorisation each base was scored with, by the base's key; empty where none was."""

    names: dict[str, str]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, study: Study) -> Memory:
        """Return what the runs of a study were scored with."""
        known = study.runs.attrs.get("metrics", {})
        scored = [(base, name) for base in study.bases if (name := _name(known, base))]
        if not scored:
            return cls({}, ())
        pixels = {known[name].get("key") == "memorisation_pixels" for _, name in scored}
        spaces = {True: "pixels", False: "the score's features"}
        fresh = dict.fromkeys(
            f"{estimate.mean:.{_DECIMALS}f} on {base.any.first('data')} ({name})"
            for base, name in scored
            if (estimate := _fresh(known, base, name))
        )
        note = (
            "Memorisation: distance to the nearest training image over that to the nearest "
            f"held-out one, in {' or '.join(sorted(spaces[one] for one in pixels))}; 0 for copies."
        )
        unseen = (f"Images that were never seen get {', '.join(fresh)}.",) if fresh else ()
        return cls({base.key: name for base, name in scored}, (note, *unseen))

    def columns(self, *labels: str) -> tuple[Column, ...]:
        """Return a column per label, none where no run was scored."""
        return tuple(Column(label) for label in labels) if self.names else ()

    def scores(self, base: Base, cell: Cell | None) -> list[Entry]:
        """Return a cell's score, its difference to the dense one, and its memorisation."""
        return [score(base, cell), difference(base, cell, base.dense), *self.entries(base, cell)]

    def entries(self, base: Base, *cells: Cell | None) -> list[Entry]:
        """Return an entry per cell, none where no run was scored."""
        if not self.names:
            return []
        name = self.names.get(base.key)
        # Endless data cannot be memorised: there is nothing to miss.
        if name is None:
            return [Entry("not scored") for _ in cells]
        return [ours(cell.estimate(f"score.{name}") if cell else None, _DECIMALS) for cell in cells]


def _name(known: dict[str, dict[str, Any]], base: Base) -> str | None:
    """Return the base's memorisation, in the features of its score before pixels."""
    score = known.get(base.metric, {})
    found: dict[str, tuple[bool, bool, int]] = {}
    for name, about in known.items():
        in_features = about.get("key") == "memorisation"
        fits = about.get("features") == score.get("features") if in_features else True
        count = sum(len(cell.by_seed(f"score.{name}")) for cell in base.cells)
        if about.get("key") in ("memorisation", "memorisation_pixels") and fits and count:
            found[name] = (in_features, about.get("n") == score.get("n"), count)
    return max(found, key=lambda name: found[name], default=None)


def _fresh(known: dict[str, dict[str, Any]], base: Base, name: str) -> Any:
    """Return what held-out images get under the same metric."""
    about = known[name]
    for other, its in known.items():
        same = all(its.get(key) == about.get(key) for key in ("features", "n"))
        if same and its.get("key") == f"{about['key']}_heldout":
            for cell in base.cells:
                if estimate := cell.estimate(f"score.{other}"):
                    return estimate
    return None
