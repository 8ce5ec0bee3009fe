"""The six scores that a run prints; `scores.jsonl` has all of them (no torch here)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MOST = 6
# What each score means in a few words. Of those that a run has, the first `MOST` are printed.
MEANINGS = {
    "fd": "Fréchet distance to held-out images",
    "sfid": "the same on spatial features",
    "is": "Inception Score",
    "accuracy": "share classified as requested",
    "adherence": "share of samples showing the class or caption",
    "precision": "share of samples close to a real image",
    "recall": "share of real images close to a sample",
    "heldout_loss": "training loss on held-out images, dense pass",
    "memorisation": "NN-distance ratio: copies 0",
}
_ARROWS = {"lower": "↓", "higher": "↑"}
_SHORT_NAMES = {"heldout_loss": "held-out loss"}


class HeadlineScore(NamedTuple):
    """One of the scores that a run prints."""

    name: str  # with an arrow towards better
    short_name: str
    value: str  # three significant digits
    meaning: str


def headline(entries: Sequence[Mapping[str, Any]], classes: int = 0) -> list[HeadlineScore]:
    """Return the scores to print of one step, in the first feature network of the evaluation.

    Args:
        entries: Scores as `Score.to_dict` returns them, in the order of the evaluation.
        classes: Number of classes, for the accuracy of guessing; 0 if unknown.
    """
    first = features_of(entries)
    by_key: dict[str, Mapping[str, Any]] = {}
    for entry in entries:
        features = str(entry.get("features") or first).partition("@")[0]
        if features == first:
            by_key[str(entry.get("key"))] = entry
    scores = []
    for key in [key for key in MEANINGS if key in by_key][:MOST]:
        value = float(by_key[key]["value"])
        label = str(by_key[key]["metric"]).partition(" ")[0].rpartition("-")[0]
        short_name = _SHORT_NAMES.get(key, label)
        arrow, meaning = _ARROWS.get(str(by_key[key].get("better")), ""), MEANINGS[key]
        name = f"{short_name} {arrow}".strip()
        if key == "memorisation":  # above the ratio of held-out images, more is not better
            name = short_name
            unseen = by_key.get("memorisation_heldout")
            if unseen:
                meaning += f", unseen images {float(unseen['value']):.2g}"
        if key == "accuracy" and classes > 1:
            meaning += f" (chance {1 / classes:.2g})"
        scores.append(HeadlineScore(name, short_name, f"{value:.3g}", meaning))
    return scores


def one_line(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return scores as one short line: without precision and memorisation."""
    parts = []
    for score in headline(entries):
        if score.short_name not in ("precision", "memorisation"):
            parts.append(f"{score.short_name} {score.value}")
    return "  ".join(parts)


def features_of(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return the name of the first feature network, empty without one."""
    for entry in entries:
        if entry.get("features"):
            return str(entry["features"]).partition("@")[0]
    return ""
