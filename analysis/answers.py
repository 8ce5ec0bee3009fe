"""One paragraph per question of the paper, computed from runs: the text of the notebooks.

Every number is that of the table or figure on the same runs, or of the paper (`paper.yaml`). A
difference is significant where its paired 95 % interval over seeds excludes zero; comparisons of
fewer than three paired seeds are not judged.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import pandas as pd

from analysis import findings
from analysis.aggregation import ENOUGH_SEEDS, Estimate, number_range
from analysis.errors import pick
from analysis.grouping import short_labels
from analysis.groups import Group, Variant
from analysis.pair_penalty import pair_penalty
from analysis.results import Results
from analysis.similarity_file import SimilarityFile
from analysis.tables import guidance as guidance_table
from analysis.tables import paper
from analysis.tables.entries import gap, metric_decimals, metric_label
from routing.route import Route


@dataclass(frozen=True)
class Comparison:
    """A routed variant against the dense runs of its group, paired by seed."""

    group: Group
    variant: Variant
    difference: Estimate  # of the group's metric, routed minus dense


def main(results: Results) -> str:
    """Answer whether routing improves the score after equal steps, and what it costs."""
    comparisons = []
    for group, dense, routed in results.pairs():
        difference = gap(routed, dense, group.metric)
        if difference is not None:
            comparisons.append(Comparison(group, routed, difference))
    if not comparisons:
        return _missing("dense and routed runs with a common seed and scores after equal steps")
    names = short_labels(comparison.group.label for comparison in comparisons)
    scores, penalties, shares = [], [], []
    for comparison in comparisons:
        group, routed = comparison.group, comparison.variant
        name = names[group.label]
        if routed.macs_share:
            shares.append(routed.macs_share)
        if comparison.difference.n >= ENOUGH_SEEDS:
            scores.append(f"{name} {_change(comparison)}")
        penalties += _relative_cost(results, comparison, name)
    published = paper.main_row("dit", "edm", "B/2") or {}
    sentences = [
        f"In the paper, {published['model']} improves from FID {published['dense']:.2f} to "
        f"{published['tread']:.2f} after equal steps.",
        f"Here: {_tally(comparisons)}.",
    ]
    if scores:
        sentences.append(f"Dense and routed: {'; '.join(scores)}.")
    if shares:
        share = _range(shares, 2)
        sentences.append(f"A routed step costs {share} times the multiply-adds of a dense one.")
    if penalties:
        sentences.append(
            "Multiply-adds that routed runs need for the held-out loss of dense ones, relative to "
            f"dense: {'; '.join(penalties)}."
        )
    return " ".join(sentences)


def _change(comparison: Comparison) -> str:
    """Return a group's scores, dense and routed, with their difference and its verdict."""
    group, routed = comparison.group, comparison.variant
    digits = metric_decimals(group.metric)
    assert group.baseline is not None
    dense_scores = group.baseline.by_seed(group.metric, routed.step)
    common = sorted(dense_scores.keys() & routed.by_seed().keys())
    before = sum(dense_scores[seed] for seed in common) / len(common)
    after = sum(routed.by_seed()[seed] for seed in common) / len(common)
    change = findings.change(comparison.difference, digits)
    return (
        f"{metric_label(group.metric)} {before:.{digits}f} and {after:.{digits}f}, {change} "
        f"(n={len(common)}, {findings.verdict(comparison.difference, group.better)})"
    )


def _relative_cost(results: Results, comparison: Comparison, name: str) -> list[str]:
    """Return s * m of a comparison with enough seeds; nothing where it was not measured."""
    dense, routed = comparison.group.pair()
    if dense is None or routed is None:
        return []
    pair = pair_penalty(results, comparison.group, dense, routed)
    if pair is None or len(pair.last_steps) < ENOUGH_SEEDS:
        return []
    estimate = pair.penalty.sm
    if estimate is None or estimate.low is None or estimate.high is None:
        return [f"{name} {pair.penalty.censored_text}"]
    interval = f"[{estimate.low:.2f}, {estimate.high:.2f}]"
    return [f"{name} {estimate.mean:.2f} {interval} at {pair.step:.0f} dense steps"]


def placement(results: Results) -> str:
    """Answer which blocks routed tokens should skip."""
    sentences = findings.placement(results)
    if not sentences:
        return _missing("three or more routes after equal steps")
    table = paper.table("placement")
    best = table.loc[table["fid"].idxmin()]
    comparisons = []
    for group in results.groups:
        for variant in group.tread:
            difference = gap(variant, group.baseline, group.metric)
            if difference is not None and variant.first("rate") == 0.5:
                comparisons.append(Comparison(group, variant, difference))
    start = (
        f"In the paper, route {best['route']} is the best of {len(table)}: FID {best['fid']:.2f} "
        f"against {table.attrs['baseline']:.2f} without a route."
    )
    return " ".join([start, f"Here: {_tally(comparisons)}.", *sentences])


def rate(results: Results) -> str:
    """Answer how many tokens should take the route."""
    sentences = findings.rate(results)
    if not sentences:
        return _missing("runs of one route at two or more rates, and dense runs of their seeds")
    by_rate = dict(paper.table("rate")[["rate", "fid"]].itertuples(index=False))
    best = min(by_rate, key=by_rate.__getitem__)
    comparisons = []
    for group, variant, difference in findings.rate_differences(results):
        comparisons.append(Comparison(group, variant, difference))
    start = (
        f"In the paper, a rate of {best:g} is the best: FID {by_rate[best]:.2f} against "
        f"{by_rate[0.0]:.2f} without a route."
    )
    shares: dict[float, list[float]] = {}
    for comparison in comparisons:
        if comparison.variant.macs_share:
            share = float(comparison.variant.first("rate"))
            shares.setdefault(share, []).append(comparison.variant.macs_share)
    costs = [f"{_range(values, 2)} at rate {share:g}" for share, values in sorted(shares.items())]
    paragraph = [start, f"Here: {_tally(comparisons)}.", *sentences]
    if costs:
        text = ", ".join(costs)
        paragraph.append(f"Multiply-adds of a routed step relative to a dense one: {text}.")
    return " ".join(paragraph)


def similarity(maps: Sequence[SimilarityFile]) -> str:
    """Answer whether routing makes the blocks that tokens skip more alike."""
    routed_maps = [item for item in maps if item.route != "none"]
    texts, more_alike = [], 0
    for item in routed_maps:
        dense = _dense_map(item, maps)
        if dense is None:
            continue
        before, after = _alike(dense, item.route), _alike(item, item.route)
        more_alike += after > before
        texts.append(
            f"{item.model} {before:.2f} dense and {after:.2f} with route {item.route} (neighbours "
            f"over all blocks {_neighbours(dense):.2f} and {_neighbours(item):.2f})"
        )
    if not texts:
        return _missing("layer similarity of a dense and a routed run of one backbone")
    return (
        "In the paper, neighbouring blocks of a dense model are alike, and the block before a "
        "route becomes like those inside it (Fig. 4, without numbers). Here the blocks inside the "
        f"route are more alike after training with it in {more_alike} of {len(texts)} pairs of "
        f"runs, one seed each. Mean cosine similarity of these blocks' outputs: "
        f"{'; '.join(texts)}."
    )


def _dense_map(routed: SimilarityFile, maps: Iterable[SimilarityFile]) -> SimilarityFile | None:
    for item in maps:
        is_same = item.model == routed.model and item.protocol["data"] == routed.protocol["data"]
        if item.route == "none" and is_same:
            return item
    return None


def _alike(item: SimilarityFile, route: str) -> float:
    """Return the mean cosine of every two outputs of the blocks that a route skips."""
    values = item.arrays["cosine"]
    blocks = Route.parse(route).resolve(len(values) - 1).sparse_blocks
    pairs = []
    for first in blocks:
        for second in blocks:
            if first < second:
                pairs.append(float(values[first + 1, second + 1]))  # index 0 is the input
    return sum(pairs) / len(pairs) if pairs else 1.0


def _neighbours(item: SimilarityFile) -> float:
    return float(item.arrays["cosine"].diagonal(1).mean())


def guidance(results: Results) -> str:
    """Answer whether guidance improves routed models as much as dense ones."""
    frame = guidance_table.responses(results)
    texts: list[str] = []
    seeds: list[float] = []
    ratios: dict[tuple[str, str], list[float]] = {}
    metrics = {group.label: group.metric for group in results.groups}
    names = short_labels(metrics)
    for label, part in [] if frame.empty else frame.groupby("group", sort=False):
        part = part[part["metric"] == part["metric"].iloc[0]]
        kinds = []
        for variant, curve in part.groupby("variant", sort=False):
            kind = "dense" if variant == "dense" else "routed"
            text = _response(curve, kind, ratios)
            if text:
                kinds.append(f"{kind} {text}")
                seeds += list(curve["n"])
        if kinds:
            texts.append(f"{names[str(label)]} ({part['metric'].iloc[0]}): {', '.join(kinds)}")
    if not texts:
        return _missing("runs with scores without guidance and under two guidance settings")
    answer = []
    for setting in ("at the best CFG scale", "under SG"):
        parts = []
        for kind in ("dense", "routed"):
            if (setting, kind) in ratios:
                parts.append(f"{_range(ratios[setting, kind], 2)} ({kind})")
        if parts:
            answer.append(f"{' and '.join(parts)} {setting}")
    published = {row["key"]: row["fid"] for row in paper.rows("guidance")}
    exploratory = ", too few to tell" if min(seeds) < ENOUGH_SEEDS else ""
    return (
        f"In the follow-up paper, CFG improves a routed SiT-XL/2 from FID {published['none']:.2f} "
        f"to {published['cfg']:.2f}, and SG (two selection rates of the same weights) to "
        f"{published['sg_flops']:.2f}. Here the score over that without guidance is "
        f"{', and '.join(answer)} (n={number_range(seeds)}{exploratory}). "
        f"{'; '.join(texts)}."
    )


def _response(
    curve: pd.DataFrame, kind: str, ratios: dict[tuple[str, str], list[float]]
) -> str | None:
    """Return scores without guidance, at the best scale of CFG and under SG; collect ratios."""
    scores = curve.set_index("setting")["mean"].to_dict()
    unguided = scores.pop("CFG 1", None)
    if not unguided:
        return None
    digits = metric_decimals(str(curve["metric"].iloc[0]))
    best = min if curve["better"].iloc[0] != "higher" else max
    text = f"{unguided:.{digits}f} without guidance"
    for name, setting in (("CFG", "at the best CFG scale"), ("SG", "under SG")):
        values = {key: value for key, value in scores.items() if key.startswith(name)}
        if values:
            key = best(values, key=values.__getitem__)
            ratios.setdefault((setting, kind), []).append(values[key] / unguided)
            text += f", {values[key]:.{digits}f} with {key}"
    return text


def _tally(comparisons: Iterable[Comparison]) -> str:
    """Return how many comparisons with enough seeds are significant, in which direction."""
    verdicts: Counter[str] = Counter()
    few = 0
    for comparison in comparisons:
        if comparison.difference.n < ENOUGH_SEEDS:
            few += 1
        else:
            verdicts[findings.verdict(comparison.difference, comparison.group.better)] += 1
    total = sum(verdicts.values())
    text = f"no comparison with dense runs has {ENOUGH_SEEDS} paired seeds"
    if total:
        text = (
            f"of {total} comparisons with dense runs after equal steps, routed models are "
            f"significantly better in {verdicts['significantly better']}, significantly worse in "
            f"{verdicts['significantly worse']}, and not significantly different in "
            f"{verdicts[findings.NOT_SIGNIFICANT]}"
        )
    if few and total:
        text += f" ({few} more have fewer than {ENOUGH_SEEDS} paired seeds)"
    return text


def _range(values: Sequence[float], digits: int) -> str:
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low} to {high}"


def _missing(needed: str) -> str:
    return f"These runs do not answer this question: it needs {needed}."


ANSWERS: dict[str, Callable[[Results], str]] = {
    "main": main, "placement": placement, "rate": rate, "guidance": guidance,
}  # fmt: skip


def make(name: str, results: Results) -> str:
    """Return the paragraph of that name as Markdown; `AnalysisError` if there is none."""
    return pick("answer", name, ANSWERS)(results)
