"""Memorisation beside a score: a distance that was bought by copying is worth nothing.

The number is the mean distance of samples to their nearest training image over that to their
nearest held-out one, 0 for copies of the training set. The two sets differ in size, so images that
were never seen do not get exactly 1; what they get stands in the note.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from analysis.runs.cells import Base, Cell, Study
from analysis.tables.table import Column, Entry, missing, ours, words

_KEYS = ("memorisation", "memorisation_pixels")
_DECIMALS = 3


@dataclass(frozen=True)
class Memory:
    """Which memorisation each base was scored with, by the base's key; empty where none was."""

    names: dict[str, str]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, study: Study) -> Memory:
        """Return what the runs of a study were scored with."""
        known = study.runs.attrs.get("metrics", {})
        names = {base.key: name for base in study.bases if (name := _name(known, base))}
        if not names:
            return cls({}, ())
        spaces = sorted(
            {_space(known[names[base.key]]) for base in study.bases if base.key in names}
        )
        fresh = dict.fromkeys(
            f"{estimate.mean:.{_DECIMALS}f} on {base.any.first('data')} ({names[base.key]})"
            for base in study.bases
            if base.key in names and (estimate := _fresh(known, base, names[base.key]))
        )
        note = (
            "Memorisation: distance to the nearest training image over that to the nearest "
            f"held-out one, in {' or '.join(spaces)}; 0 for copies."
        )
        unseen = (f"Images that were never seen get {', '.join(fresh)}.",) if fresh else ()
        return cls(names, (note, *unseen))

    def columns(self, *labels: str) -> tuple[Column, ...]:
        """Return a column per label, none where no run was scored."""
        return tuple(Column(label) for label in labels) if self.names else ()

    def entries(self, base: Base, *cells: Cell | None) -> list[Entry]:
        """Return an entry per cell, none where no run was scored."""
        if not self.names:
            return []
        name = self.names.get(base.key)
        # Endless data cannot be memorised: there is nothing to miss.
        if name is None:
            return [words("not scored") for _ in cells]
        column = f"score.{name}"
        return [ours(cell.estimate(column) if cell else None, _DECIMALS) for cell in cells]

    def blank(self, count: int = 1) -> list[Entry]:
        """Return entries for a row of the paper's."""
        return [missing() for _ in range(count)] if self.names else []


def _space(about: dict[str, Any]) -> str:
    return "pixels" if about.get("key") == "memorisation_pixels" else "the score's features"


def _name(known: dict[str, dict[str, Any]], base: Base) -> str | None:
    """Return the base's memorisation, in the features of its score before pixels."""
    score = known.get(base.metric, {})
    found: dict[str, tuple[bool, bool, int]] = {}
    for name, about in known.items():
        in_features = about.get("key") == "memorisation"
        if about.get("key") not in _KEYS or (
            in_features and about.get("features") != score.get("features")
        ):
            continue
        count = sum(len(cell.by_seed(f"score.{name}")) for cell in base.cells)
        if count:
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
