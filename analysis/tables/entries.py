"""Headings, labels and entries that tables make from groups and variants.

The NN-distance ratio is shown beside every score, since a low distance may come from copying
(metrics store it as `memorisation`): the mean distance of samples to their nearest training image
over that to their nearest held-out one. Lower values indicate copying, 0 exact copies. The two sets
differ in size, so images that were never seen do not get exactly 1; a note says what they get.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from analysis.comparison.aggregation import Estimate, paired
from analysis.comparison.groups import Group, Variant
from analysis.comparison.results import Results
from analysis.tables import paper
from analysis.tables.table import Column, Entry, Heading, Value, measured

_NN_RATIO = "NN-distance ratio"
_DIGITS = {
    5: ("kd", "kid"),
    4: ("heldout",),
    3: ("accuracy", "precision", "recall", "memorisation", "adherence", "w_eff"),
}


def metric_label(metric: str) -> str:
    """Return a metric's name as tables and figures show it.

    Records keep the name `memorisation` for what is a ratio of nearest-neighbour distances.
    """
    if metric.startswith("memorisation"):
        return _NN_RATIO + metric.removeprefix("memorisation")
    return metric


def metric_better(metric: Mapping[str, Any]) -> str | None:
    """Return the better end of a metric from its meaning; None where neither end is.

    A higher NN-distance ratio is no better: low values warn of copying, and that is all.
    """
    if str(metric.get("key")).startswith("memorisation"):
        return None
    return metric.get("better")


def metric_decimals(metric: str) -> int:
    """Return a metric's digits: distances two, shares three, losses four, squared MMD five."""
    for digits, prefixes in _DIGITS.items():
        if metric.lower().startswith(prefixes):
            return digits
    return 2


def better_end(results: Results) -> str | None:
    """Return the better end of the groups' metrics; None where groups differ."""
    ends = set()
    for group in results.groups:
        ends.add(metric_better({"better": "lower", **group.known_metrics[group.metric]}))
    if len(ends) > 1:
        return None
    return ends.pop() if ends else "lower"


# --- headings -------------------------------------------------------------------------------------


def heading(group: Group, *variants: Variant | None, tail: str = "", content: str = "") -> Heading:
    """Return a group's heading: what its runs share, the metric (or `content`), guidance, steps.

    The steps are those of the variants that the table shows, by default all of the group's.
    """
    guidance = group.first("guidance")
    text = f"{group.label}: {content or metric_label(group.metric)}"
    if guidance:
        # Without guidance the scale is 1 by definition.
        text += f", guidance {'none' if guidance == 'none scale=1.0' else guidance}"
    present = list(filter(None, variants)) or list(group.variants)
    result = Heading(f"{text}{after(present)}{tail}")
    result.mixed = len({variant.step for variant in present}) > 1
    return result


def after(variants: Sequence[Variant]) -> str:
    """Return the steps after which variants are read, `, after 400 steps (4-8: 600)`.

    In the brackets are also runs that were left out because they ended after other steps.
    """
    counts = Counter(f"{variant.step:.0f}" for variant in variants)
    usual, _ = counts.most_common(1)[0]
    exceptions = []
    for variant in variants:
        if f"{variant.step:.0f}" != usual:
            exceptions.append(f"{variant.name}: {variant.step:.0f}")
    for variant in variants:
        if variant.other_steps:
            exceptions.append(f"left out: runs of {variant.name} with {_other_steps(variant)}")
    return f", after {usual} steps" + (f" ({'; '.join(exceptions)})" if exceptions else "")


def steps(variant: Variant) -> str:
    """Return the number of steps behind a variant's scores, and those of runs left out."""
    text = f"{variant.step:.0f}"
    if variant.other_steps:
        text += f" (left out: runs of {_other_steps(variant)})"
    return text


def _other_steps(variant: Variant) -> str:
    return f"{' and '.join(map(str, variant.other_steps))} steps"


# --- entries --------------------------------------------------------------------------------------


def score(metric: str, variant: Variant | None) -> Entry:
    """Return a variant's score by a metric."""
    estimate = variant.estimate(metric) if variant else None
    return measured(estimate, metric_decimals(metric))


def difference(metric: str, variant: Variant | None, baseline: Variant | None) -> Entry:
    """Return a variant's score minus the baseline's as `gap` does; the baseline's own is empty."""
    if variant is not None and variant is baseline:
        return Entry()
    return signed(gap(variant, baseline, metric), metric)


def signed(estimate: Estimate | None, metric: str) -> Entry:
    """Return a difference of a metric."""
    return measured(estimate, metric_decimals(metric), signed=True)


def gap(variant: Variant | None, baseline: Variant | None, metric: str) -> Estimate | None:
    """Return a variant's score minus the baseline's after the same steps, paired by seed."""
    if variant is None or baseline is None:
        return None
    return paired(baseline.by_seed(metric, variant.step), variant.by_seed(metric))


def scores(group: Group, variant: Variant | None) -> list[Value]:
    """Return a variant's score, its difference to the baseline, and its NN-distance ratio."""
    change = difference(group.metric, variant, group.baseline)
    return [score(group.metric, variant), change, *nn_ratios(group, variant)]


# --- NN-distance ratio ----------------------------------------------------------------------------


def nn_ratio_columns(results: Results, *labels: str) -> tuple[Column, ...]:
    """Return a column per label, not shown where no run was scored."""
    is_scored = any(group.nn_ratio for group in results.groups)
    return Column.each(*labels, decimals=3, shown=is_scored)


def nn_ratios(group: Group, *variants: Variant | None) -> list[Value]:
    """Return each variant's NN-distance ratio; endless data has no training set: never missing."""
    values: list[Value] = []
    for variant in variants:
        if group.nn_ratio is None:
            values.append(Entry("not scored"))
        else:
            values.append(variant.estimate(group.nn_ratio) if variant else None)
    return values


def nn_ratio_notes(results: Results) -> tuple[str, ...]:
    """Say what the NN-distance ratio means, and what unseen images get; nothing without."""
    spaces, unseen = set(), dict[str, None]()
    for group in results.groups:
        if group.nn_ratio is None:
            continue
        in_pixels = group.known_metrics[group.nn_ratio]["key"] == "memorisation_pixels"
        spaces.add("pixels" if in_pixels else "the score's features")
        mean = _unseen_ratio(group, group.nn_ratio)
        if mean is not None:
            label = metric_label(group.nn_ratio)
            unseen[f"{mean:.3f} on {group.first('data')} ({label})"] = None
    if not spaces:
        return ()
    note = (
        f"{_NN_RATIO} (train / held-out): distance to the nearest training image over that to the "
        f"nearest held-out one, in {' or '.join(sorted(spaces))}; lower values indicate copying, "
        "0 exact copies."
    )
    if not unseen:
        return (note,)
    return note, f"Images that were never seen get {', '.join(unseen)}."


def _unseen_ratio(group: Group, metric: str) -> float | None:
    """Return the NN-distance ratio of held-out images, which the records store beside it."""
    meaning = group.known_metrics[metric]
    wanted_meaning = {**meaning, "key": f"{meaning['key']}_heldout"}
    for name, candidate in group.known_metrics.items():
        if not all(candidate.get(k) == wanted_meaning[k] for k in ("key", "features", "n")):
            continue
        for variant in group.variants:
            estimate = variant.estimate(name)
            if estimate:
                return estimate.mean
    return None


def paper_notes(table: str, *notes: str, shown: bool = True) -> tuple[str, ...]:
    """Return a table's notes: ours, where the paper's numbers are, what to know of them.

    The latter two only where its numbers are `shown`.
    """
    if not shown:
        return notes
    note = paper.table(table).attrs.get("note")
    return (*notes, f"Paper: {paper.citation(table)}.", *([note] if note else []))
