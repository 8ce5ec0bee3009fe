"""Findings from runs as sentences, for the blocks of pages and the paragraphs of notebooks.

Every sentence is made from the numbers in the table beside it. A difference is significant where
its paired 95 % interval over seeds excludes zero; it is not judged below three seeds.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import pandas as pd

from analysis.comparison.aggregation import ENOUGH_SEEDS, change, paired, verdict
from analysis.comparison.groups import Group
from analysis.comparison.results import Results
from analysis.errors import pick
from analysis.reports.dense_comparison import DenseComparison
from analysis.tables import guidance, guidance_scale
from analysis.tables.entries import metric_decimals, metric_label
from routing.route import Route


class Finding(NamedTuple):
    """One finding: its subject, printed in bold, and a sentence."""

    subject: str
    statement: str

    def __str__(self) -> str:
        """Return the sentence in Markdown."""
        return f"**{self.subject}**, {self.statement}"


def response(results: Results) -> list[Finding]:
    """Say by how much guidance changes the distance of dense and of routed runs."""
    frame = guidance.responses(results)
    if frame.empty:
        return []
    sentences = []
    for group, part in frame.groupby("group", sort=False):
        metric = part["metric"].iloc[0]
        texts = []
        for variant, curve in part[part["metric"] == metric].groupby("variant", sort=False):
            values = curve.set_index("setting")["mean"].to_dict()
            unguided = values.pop("CFG 1", None)
            if unguided:
                ratios = [f"{value / unguided:.2f} ({name})" for name, value in values.items()]
                texts.append(f"{variant} {', '.join(ratios)}")
        if texts:
            text = f"{metric} over that without guidance: {'; '.join(texts)}"
            sentences.append(Finding(str(group), f"{text}."))
    return sentences


def scale(results: Results) -> list[Finding]:
    """Say how the effective guidance scale of routed runs differs from that of dense runs."""
    frame = guidance_scale.scale_rows(guidance_scale.stored_scales(results))
    frame = frame[frame["level"].isna() & frame["instrumented"].notna()]
    lengths = frame.groupby("config")["step"].nunique().to_dict()
    sentences = []
    for (config, steps), part in frame.groupby(["config", "step"], sort=False):
        name = f"{config}, after {steps:.0f} steps" if lengths[config] > 1 else str(config)
        sentences += _scale_sentences(name, part)
    return sentences


def _scale_sentences(name: str, part: pd.DataFrame) -> list[Finding]:
    """Return a sentence per route and kind of inference, for runs of one configuration."""
    by_seed: dict[tuple[str, str], dict[int, float]] = {}
    for row in part.to_dict("records"):
        by_seed.setdefault((row["route"], row["pair"]), {})[row["seed"]] = row["instrumented"]
    dense = by_seed.get(("none", "dense"), {})
    routes = part.loc[part["route"] != "none", "route"].unique()
    sentences = []
    for route in routes:
        for inference in ("dense", "routed"):
            difference = paired(dense, by_seed.get((route, inference), {}))
            if difference:
                subject = f"{name}, route {route}" if len(routes) > 1 else name
                text = f"inference {inference}: instrumented w_eff against dense "
                text += f"{change(difference, 3)}: {verdict(difference, None)} (n={difference.n})"
                sentences.append(Finding(subject, f"{text}."))
    return sentences


def placement(results: Results) -> list[Finding]:
    """Say which routes did best and worst, and how the score goes with the blocks skipped."""
    sentences = []
    for group in results.groups:
        if not group.tread:
            continue
        # Routes are ranked after equal steps: the most frequent number of steps.
        steps = Counter(variant.step for variant in group.tread).most_common(1)[0][0]
        ranked, seeds = [], []
        for variant in group.tread:
            estimate = variant.estimate()
            if variant.step == steps and estimate:
                ranked.append((estimate.mean, variant.name))
                seeds.append(estimate.n)
        if len(ranked) >= ENOUGH_SEEDS:
            ranked.sort()
            if group.better == "higher":
                ranked.reverse()
            sentences.append(_placement_sentence(group, ranked, min(seeds)))
    return sentences


def _placement_sentence(group: Group, ranked: list[tuple[float, str]], seeds: int) -> Finding:
    digits = metric_decimals(group.metric)
    blocks, texts = [], []
    for mean, name in ranked:
        blocks.append(len(Route.parse(name).resolve(group.depth).sparse_blocks))
        texts.append(f"{name} ({mean:.{digits}f})")
    half = len(blocks) // 2
    text = (
        f"{metric_label(group.metric)}: best {texts[0]}, worst {texts[-1]}; the better half of "
        f"the {len(ranked)} routes skips {sum(blocks[:half]) / half:.1f} blocks, "
        f"the other {sum(blocks[-half:]) / half:.1f}."
    )
    if seeds < ENOUGH_SEEDS:
        text += f" With n={seeds} the order of routes is not significant."
    return Finding(group.label, text)


def rate_comparisons(results: Results) -> list[DenseComparison]:
    """Compare every route that was run at two or more rates with dense runs, by rate."""
    comparisons: list[DenseComparison] = []
    for group in results.groups:
        by_span: dict[str, list[DenseComparison]] = {}
        for variant in group.tread:
            span = str(variant.first("span"))
            comparison = DenseComparison.of(group, variant)
            if "+" not in span and comparison is not None:
                by_span.setdefault(span, []).append(comparison)
        for of_span in by_span.values():
            if len(of_span) > 1:
                comparisons += sorted(of_span, key=lambda comparison: comparison.rate)
    return comparisons


def rate(results: Results) -> list[Finding]:
    """Say how the score differs from dense by the share of tokens that skips, for each route."""
    texts: dict[tuple[str, str], list[str]] = {}
    for comparison in rate_comparisons(results):
        group = comparison.group
        subject = f"{group.label}, route {comparison.variant.first('span')}"
        text = change(comparison.difference, metric_decimals(group.metric))
        text = f"{comparison.rate:g} {text}: {comparison.verdict}"
        texts.setdefault((subject, metric_label(group.metric)), []).append(text)
    sentences = []
    for (subject, metric), by_rate in texts.items():
        sentences.append(Finding(subject, f"{metric} against dense by rate: {'; '.join(by_rate)}."))
    return sentences


FINDINGS: dict[str, Callable[[Results], list[Finding]]] = {
    "response": response, "scale": scale, "placement": placement, "rate": rate,
}  # fmt: skip


def text(sentences: Iterable[Finding]) -> str:
    """Return findings as a Markdown list; one that says so where there are none."""
    return "\n".join(f"- {line}" for line in sentences) or "- These runs do not answer this."


def make(name: str, results: Results, having: Iterable[str] = ()) -> str:
    """Return the sentences of that name as Markdown, of groups whose name holds all the words.

    `UserError` if there is no such name.
    """
    parts = list(having)
    chosen = []
    for sentence in pick("findings", name, FINDINGS)(results):
        if all(part in sentence.subject for part in parts):
            chosen.append(sentence)
    return text(chosen)
