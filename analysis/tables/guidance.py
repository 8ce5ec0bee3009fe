"""Guidance: kinds and their cost (SG, Tables 1 to 3), and how scores respond to it."""

import dataclasses
import functools
import operator
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pandas as pd

from analysis.comparison.aggregation import Estimate, mean_std, number_range, paired
from analysis.comparison.groups import Group, Variant
from analysis.comparison.guidance_settings import UNGUIDED, number, parse, setting, setting_order
from analysis.comparison.results import Results
from analysis.tables import entries, paper
from analysis.tables.main import score_set
from analysis.tables.table import (
    PAIRED,
    Column,
    Entry,
    RowValues,
    Table,
    Value,
    build,
    head,
    measured,
)

# Kinds of scores that guidance changes.
_RESPONDING = ("fd", "precision", "recall", "accuracy", "adherence")
# Scores are compared over guidances where these are equal.
_PROTOCOL = ("metric", "sampler", "reference", "weights")
_COLUMNS = ["path", "seed", "step", "value", "macs_per_sample", "key", "features", "guidance"]
_COLUMNS += _PROTOCOL


def evaluations(
    results: Results, group: Group, variant: Variant, metric: str | None = None,
    accept: Callable[[str], object] = bool,
) -> pd.DataFrame:  # fmt: skip
    """Return a variant's scores after one number of steps, one row per run and guidance.

    Args:
        results: Where the scores are.
        group: Group of the variant.
        variant: Whose scores.
        metric: Full name; None is the group's own. Its kind at another number of samples is taken
            where that was measured under more guidances.
        accept: Whether a guidance is asked for.

    Of several samplers, references and kinds of weights the one that was measured under most
    guidances is taken, of two as good the run's own. The steps are those after which most guidances
    of most runs were scored.
    """
    metric = metric or group.metric
    meaning = group.known_metrics.get(metric, {})
    scores = _guided_scores(results)
    scores = scores[scores["path"].isin(variant.runs["path"])]
    for name in ("key", "features"):
        scores = scores[scores[name] == _text(meaning.get(name))]
    scores = scores[scores["guidance"].map(lambda text: bool(accept(text))).astype(bool)]
    if scores.empty:
        return scores
    sampler, reference = _text(variant.first("sampler")), _text(variant.first("reference"))
    usual = metric, sampler, reference, "ema"

    def rank(item: tuple[Any, pd.DataFrame]) -> tuple[int, int]:
        protocol, part = item
        return part["guidance"].nunique(), sum(map(operator.eq, protocol, usual))

    _, scores = max(scores.groupby(list(_PROTOCOL), sort=False), key=rank)
    # A run that was trained further, for another sweep, is read at the step that was compared.
    steps = Counter(scores.drop_duplicates(["path", "step", "guidance"])["step"])
    usual_step = max(steps, key=lambda step: (steps[step], step))
    return scores[scores["step"] == usual_step].sort_index()


@functools.lru_cache(maxsize=2)
def _guided_scores(results: Results) -> pd.DataFrame:
    """Return the scores that have a seed and a step, their protocol as text."""
    scores = results.scores[_COLUMNS].dropna(subset=["seed", "step"]).reset_index(drop=True)
    for name in ("key", "features", "guidance", *_PROTOCOL):
        scores[name] = scores[name].astype(object).map(_text)
    # The weaker model is named by its step alone: its path differs between seeds.
    guidance = scores["guidance"].replace("", "not recorded")
    scores["guidance"] = guidance.str.replace(
        r"checkpoint=\S*?(@\d+)?(?=\s|$)", r"checkpoint=run\1", regex=True
    )
    return scores


def _text(value: object) -> str:
    return "" if pd.isna(value) else str(value)  # type: ignore[call-overload]


def by_seed(part: pd.DataFrame) -> dict[int, float]:
    """Return seed to the mean of its values."""
    means = part.groupby("seed")["value"].mean()
    return dict(zip(means.index.astype(int), means.astype(float), strict=True))


# --- response to guidance -------------------------------------------------------------------------


@functools.lru_cache(maxsize=2)
def responses(results: Results) -> pd.DataFrame:
    """Return how scores respond to guidance: dense and routed, a row per metric and setting.

    A seed of which no guided samples were scored says nothing here and is left out. Columns: group,
    variant, backbone, metric, better, setting, mean, std, n, step. Empty where no group was scored
    under three settings.
    """
    rows = []
    for group in results.groups:
        group_rows: list[dict[str, Any]] = []
        for metric, meaning in score_set(group).items():
            if meaning["key"] in _RESPONDING:
                for variant in filter(None, group.pair()):
                    group_rows += _response_rows(results, group, variant, metric)
        if len({row["setting"] for row in group_rows}) >= 3:
            rows += group_rows
    return pd.DataFrame(rows)


def _response_rows(
    results: Results, group: Group, variant: Variant, metric: str
) -> list[dict[str, Any]]:
    frame = evaluations(results, group, variant, metric, setting)
    if frame.empty:
        return []
    frame = frame.assign(setting=frame["guidance"].map(setting))
    guided_seeds = frame.loc[frame["setting"] != UNGUIDED, "seed"]
    rows = []
    for name, part in frame[frame["seed"].isin(guided_seeds)].groupby("setting"):
        estimate = mean_std(by_seed(part).values())
        assert estimate is not None, "a score is a finite number"
        better = group.known_metrics[metric].get("better")
        row: dict[str, Any] = {"group": group.label, "variant": variant.name}
        row["backbone"] = group.backbone
        row |= {"setting": str(name), "metric": part["metric"].iloc[0], "better": better}
        row |= {"mean": estimate.mean, "std": estimate.std, "n": estimate.n}
        rows.append({**row, "step": int(part["step"].iloc[0])})
    return rows


def response(results: Results) -> Table:
    """Every metric of the set over the scales of CFG, under SG and under routed inference."""
    frame = responses(results)
    settings = ["CFG 1", "CFG 1.5", "SG 1.5", "routed"]
    rows: list[RowValues] = []
    if not frame.empty:
        settings = sorted(set(frame["setting"]), key=setting_order)
        for label, part in frame.groupby("group", sort=False):
            steps, seeds = number_range(part["step"]), number_range(part["n"])
            heading = f"{label}: after {steps} steps, n = {seeds}"
            for (metric, variant), curve in part.groupby(["metric", "variant"], sort=False):
                name = head(Column(str(metric), better=curve["better"].iloc[0]))
                values = _setting_entries(curve, settings)
                rows.append((heading, [name, str(variant), *values]))
    columns = (*Column.each("Metric", "Tokens", numeric=False), *Column.each(*settings))
    notes = (
        "CFG 1 is no guidance; SG guides a dense pass away from a routed one of the same weights; "
        "routed: one pass with the route, as in training.",
    )
    return build("response", "Response to guidance: dense and routed", columns, rows, notes)


def _setting_entries(curve: pd.DataFrame, settings: list[str]) -> list[Value]:
    digits = entries.metric_decimals(str(curve["metric"].iloc[0]))
    scores: dict[str, Entry] = {}
    for row in curve.to_dict("records"):
        # A single seed has no spread: NaN in a column of numbers.
        std = None if pd.isna(row["std"]) else row["std"]
        entry = measured(Estimate(row["mean"], row["n"], std), digits)
        # The number of seeds is in the heading.
        scores[row["setting"]] = dataclasses.replace(entry, n=None)
    return [scores.get(name, "") for name in settings]


# --- cost of guidance -----------------------------------------------------------------------------


def guidance(results: Results) -> Table:
    """Scores and cost under each guidance, per trained variant (SG, Tables 1 and 2)."""
    paper_rows = {row["key"]: row for row in paper.rows("guidance")}
    rows: list[RowValues] = []
    has_paper = False
    for group in results.groups:
        beside = paper_rows if paper.matches(group, "guidance") else {}
        for variant in group.variants:
            frame = evaluations(results, group, variant)
            if frame.empty or frame["guidance"].nunique() < 2:
                continue
            heading = f"{group.label}, {variant.name}: {frame['metric'].iloc[0]}, "
            heading += f"after {frame['step'].iloc[0]:.0f} steps"
            has_paper = has_paper or bool(beside)
            for values in _guidance_rows(group, frame, beside):
                rows.append((heading, values))
    not_run = [(row["method"], [row["fid"], row["gmacs"]]) for row in paper_rows.values()]
    has_paper = has_paper or not rows
    columns = (
        Column("Guidance", numeric=False),
        Column("Score", better=entries.better_end(results)),
        Column("\u0394 to none"),
        Column("GMACs per sample", decimals=3),
        Column("GMACs per step", decimals=4),
        *Column.each("Paper FID-50K", "Paper GMACs per step", published=True, shown=has_paper),
    )
    texts = [PAIRED]
    if has_paper:
        texts.append(
            "The paper's two sparse settings are shown beside ours of the same kind: SG_FLOPS at "
            "rates 0.5 and 0.9, SG_FID beside our best sparse setting."
        )
    notes = entries.paper_notes("guidance", *texts, shown=has_paper)
    title = "Guidance and its cost (SG, Tables 1 and 2)"
    return build("guidance", title, columns, rows, notes, not_run)


def _guidance_rows(
    group: Group, frame: pd.DataFrame, paper_rows: dict[str, dict[str, Any]]
) -> list[list[Value]]:
    """Return a row per guidance of one variant."""
    best = _best_routed(frame, group.better)
    parts = {str(text): part for text, part in frame.groupby("guidance")}
    unguided = next((text for text in parts if parse(text)[0] == "none"), None)
    baseline = by_seed(parts[unguided]) if unguided else {}
    digits = entries.metric_decimals(group.metric)
    rows = []
    for text, part in parts.items():
        scores = by_seed(part)
        change = measured(paired(baseline, scores), digits, signed=True)
        paper_row = paper_rows.get(_paper_key(text, text == best), {})
        rows.append([
            text,
            measured(mean_std(scores.values()), digits),
            Entry() if text == unguided else change,
            *_cost(part),
            paper_row.get("fid"),
            paper_row.get("gmacs"),
        ])  # fmt: skip
    return rows


def _best_routed(frame: pd.DataFrame, better: str) -> str | None:
    routed = frame[frame["guidance"].str.startswith("routed")]
    if routed.empty:
        return None
    means = routed.groupby("guidance")["value"].mean()
    return str(means.idxmin() if better == "lower" else means.idxmax())


def _cost(part: pd.DataFrame) -> tuple[float | None, float | None]:
    """Return the multiply-adds (in units of 1e9) of a sample and of one step of its sampler."""
    macs = part["macs_per_sample"].dropna()
    if macs.empty:
        return None, None
    per_sample = float(macs.mean()) / 1e9
    steps = re.search(r"steps=(\d+)", str(part["sampler"].iloc[0]))  # of `heun steps=12`
    if steps is None or int(steps[1]) == 0:
        return per_sample, None
    return per_sample, per_sample / int(steps[1])


def _paper_key(text: str, is_best: bool) -> str:
    """Return the paper's name of a guidance."""
    kind, options = parse(text)
    if kind != "routed":
        return kind
    if (number(options["strong"]), number(options["weak"])) == (0.5, 0.9):
        return "sg_flops"
    return "sg_fid" if is_best else ""
