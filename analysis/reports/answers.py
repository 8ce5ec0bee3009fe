"""One paragraph per question of the paper, computed from runs: the text of the notebooks.

Every number is that of the table or figure on the same runs, or of the paper (`paper.yaml`). A
difference is significant where its paired 95 % interval over seeds excludes zero; comparisons of
fewer than three paired seeds are not judged.
"""

from collections.abc import Callable, Iterable, Sequence

import pandas as pd

from analysis.comparison.aggregation import ENOUGH_SEEDS, number_range
from analysis.comparison.results import Results
from analysis.errors import pick
from analysis.measurements.similarity_file import SimilarityFile
from analysis.reports import findings
from analysis.reports.dense_comparison import DenseComparison, relative_cost, tally
from analysis.runs.grouping import short_labels
from analysis.tables import guidance as guidance_table
from analysis.tables import paper
from analysis.tables.entries import metric_decimals


def main(results: Results) -> str:
    """Answer whether routing improves the score after equal steps, and what it costs."""
    comparisons = []
    for group, _, routed in results.pairs():
        comparison = DenseComparison.of(group, routed)
        if comparison is not None:
            comparisons.append(comparison)
    if not comparisons:
        return _missing("dense and routed runs with a common seed and scores after equal steps")
    names = short_labels(comparison.group.label for comparison in comparisons)
    scores, penalties, shares = [], [], []
    for comparison in comparisons:
        name = names[comparison.group.label]
        if comparison.variant.macs_share:
            shares.append(comparison.variant.macs_share)
        if comparison.has_enough_seeds:
            scores.append(f"{name} {comparison.describe()}")
        penalty = relative_cost(results, comparison.group)
        if penalty is not None:
            penalties.append(f"{name} {penalty}")
    published = paper.main_row("dit", "edm", "B/2") or {}
    sentences = [
        f"In the paper, {published['model']} improves from FID {published['dense']:.2f} to "
        f"{published['tread']:.2f} after equal steps.",
        f"Here: {tally(comparisons)}.",
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


def placement(results: Results) -> str:
    """Answer which blocks routed tokens should skip."""
    sentences = findings.placement(results)
    if not sentences:
        return _missing("three or more routes after equal steps")
    table = paper.table("placement")
    best = min(paper.rows("placement"), key=lambda row: row["fid"])
    comparisons = []
    for group in results.groups:
        for variant in group.tread:
            comparison = DenseComparison.of(group, variant)
            if comparison is not None and variant.first("rate") == 0.5:
                comparisons.append(comparison)
    start = (
        f"In the paper, route {best['route']} is the best of {len(table)}: FID {best['fid']:.2f} "
        f"against {table.attrs['baseline']:.2f} without a route."
    )
    return " ".join([start, f"Here: {tally(comparisons)}.", *map(str, sentences)])


def rate(results: Results) -> str:
    """Answer how many tokens should take the route."""
    sentences = findings.rate(results)
    if not sentences:
        return _missing("runs of one route at two or more rates, and dense runs of their seeds")
    by_rate = {row["rate"]: row["fid"] for row in paper.rows("rate")}
    best = min(by_rate, key=by_rate.__getitem__)
    comparisons = findings.rate_comparisons(results)
    start = (
        f"In the paper, a rate of {best:g} is the best: FID {by_rate[best]:.2f} against "
        f"{by_rate[0.0]:.2f} without a route."
    )
    shares: dict[float, list[float]] = {}
    for comparison in comparisons:
        if comparison.variant.macs_share:
            shares.setdefault(comparison.rate, []).append(comparison.variant.macs_share)
    costs = [f"{_range(values, 2)} at rate {share:g}" for share, values in sorted(shares.items())]
    paragraph = [start, f"Here: {tally(comparisons)}.", *map(str, sentences)]
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
        before, after = dense.cosine_inside(item.route), item.cosine_inside(item.route)
        more_alike += after > before
        texts.append(
            f"{item.model} {before:.2f} dense and {after:.2f} with route {item.route} (neighbours "
            f"over all blocks {dense.neighbour_cosine():.2f} and {item.neighbour_cosine():.2f})"
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
    scores = dict(zip(curve["setting"].astype(str), curve["mean"].astype(float), strict=True))
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
