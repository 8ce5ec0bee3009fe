"""Guidance: responses to its scale, and maps of two rates (SG, Figs. 4 to 8)."""

import math
from collections.abc import Sequence
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes

from analysis.comparison.aggregation import DENSE, half_width, mean_std, number_range
from analysis.comparison.groups import Group, Variant
from analysis.comparison.guidance_settings import number, parse, setting_order
from analysis.comparison.results import Results
from analysis.figures import style
from analysis.figures.style import Plot, styled
from analysis.runs.grouping import shared_label, short_labels
from analysis.tables.entries import metric_decimals, metric_label
from analysis.tables.guidance import by_seed, evaluations, responses

_MOST_MAPS = 6  # on one page
_SMALLEST_MAP = 4  # pairs of rates
_RATES = ("scale", "strong", "weak")


def _rates(text: str) -> dict[str, float | None]:
    """Return scale and rates of routed guidance; under anything more it has no place in a map."""
    kind, options = parse(text)
    if kind != "routed" or not options.keys() <= {*_RATES, "route"}:
        return {}
    rates = {key: number(options.get(key)) for key in _RATES}
    return {} if None in rates.values() else rates


@styled
def guidance(results: Results) -> Plot | None:
    """Draw a map per variant and scale that was scored at four or more pairs of rates, or None."""
    rows: list[dict[str, Any]] = []
    for group in results.groups:
        for variant in group.variants:
            rows += _map_rows(results, group, variant)
    if not rows:
        return None
    frame = pd.DataFrame(rows)
    maps = []
    for key, part in frame.groupby(["panel", "variant", "scale"], sort=False):
        if len(part) >= _SMALLEST_MAP:
            maps.append((key, part))
    if not maps:
        return None
    shown, more = style.fitting(maps, _MOST_MAPS, lambda item: len(item[1]))
    figure, axes = style.panels(len(shown), 2, 2.5)
    names = short_labels(str(panel) for (panel, *_), _ in maps)
    for ax, ((panel, variant, scale), part) in zip(axes.flat, shown, strict=False):
        # Maps of one model have one scale of colours: a flat map looks flat.
        same_model = frame[(frame["panel"] == panel) & frame["metric"].isin(part["metric"])]
        _draw_map(ax, part, _colour_range(same_model))
        text = f"{variant}, w={scale:g}, step {part['step'].iloc[0]}, n={number_range(part['n'])}"
        tint = style.colour(str(part["backbone"].iloc[0]))
        ax.set_title(f"{fill(names[str(panel)], 48)}\n{text}", color=tint)
    return Plot.of("guidance", figure, frame, names=shared_label(names), more=more)


def _map_rows(results: Results, group: Group, variant: Variant) -> list[dict[str, Any]]:
    """Return a row per pair of rates that a variant was scored at."""
    scores = evaluations(results, group, variant, accept=_rates)
    rows: list[dict[str, Any]] = []
    for text, part in () if scores.empty else scores.groupby("guidance"):
        estimate = mean_std(by_seed(part).values())
        if estimate:
            row: dict[str, Any] = {"panel": group.label, "variant": variant.name}
            row["better"] = group.better
            row |= {"backbone": group.backbone, "metric": part["metric"].iloc[0]}
            row |= {**_rates(str(text)), "value": estimate.mean, "std": estimate.std}
            rows.append({**row, "n": estimate.n, "step": int(part["step"].iloc[0])})
    return rows


def _colour_range(maps: pd.DataFrame) -> tuple[float, float]:
    """Return the scores at both ends of the colours: four standard deviations apart at least.

    Otherwise differences far below the spread between seeds would take all colours. Where single
    seeds give no spread, a tenth of the middle score stands in its place.
    """
    low, high = float(maps["value"].min()), float(maps["value"].max())
    middle, spread = (low + high) / 2, float(maps["std"].astype(float).max())
    if math.isnan(spread):
        spread = 0.1 * abs(middle)
    half = max((high - low) / 2, 2 * spread)
    return middle - half, middle + half


def _draw_map(ax: Axes, part: pd.DataFrame, ends: tuple[float, float]) -> None:
    scores = part.set_index(["strong", "weak"])
    strong, weak = sorted(set(part["strong"]), reverse=True), sorted(set(part["weak"]))
    values = np.full((len(strong), len(weak)), np.nan)
    for row in part.to_dict("records"):
        values[strong.index(row["strong"]), weak.index(row["weak"])] = row["value"]
    ax.set_facecolor("#f2f2f2")
    # Dark is better.
    higher = part["better"].iloc[0] == "higher"
    cmap = colormaps["viridis_r" if higher else "viridis"]
    image = ax.imshow(values, cmap=cmap, vmin=ends[0], vmax=ends[1], aspect="auto", zorder=1)
    digits = metric_decimals(part["metric"].iloc[0])
    for (y, x), value in np.ndenumerate(values):
        if np.isnan(value):
            style.centred(ax, x, y, "\u00d7", color="#999999")
            continue
        std, n = scores.loc[(strong[y], weak[x]), ["std", "n"]].to_numpy(float)
        text = f"{value:.{digits}f}"
        if not np.isnan(std):
            text += f"\n\u00b1{half_width(float(std), int(n)):.{digits}f}"
        ink = style.ink(cmap(image.norm(value)))
        style.centred(ax, x, y, text, color=ink, fontsize=7, linespacing=1.1)
    ax.set_xticks(range(len(weak)), [f"{rate:g}" for rate in weak])
    ax.set_yticks(range(len(strong)), [f"{rate:g}" for rate in strong])
    ax.set(xlabel="rate of the weak pass", ylabel="rate of the strong pass")
    ax.grid(False)
    ax.figure.colorbar(image, ax=ax, label=metric_label(str(part["metric"].iloc[0])), pad=0.02)


@styled
def response(results: Results) -> Plot | None:
    """Draw a line of panels per group, a panel a metric; None without scores under three settings.

    Every panel has the settings at equal distances: the scales of CFG joined by a line, then SG and
    routed inference, which are no points of that line.
    """
    frame = responses(results)
    if frame.empty:
        return None
    frame = _in_first_features(frame)
    settings = sorted(set(frame["setting"]), key=setting_order)
    names = short_labels(frame["group"])
    metrics = frame.groupby("group", sort=False)["metric"].unique()
    columns = max(map(len, metrics))
    figure, axes = style.canvas(1.35 * len(metrics) + 0.75, len(metrics), columns, sharex=True)
    handles: dict[str, Any] = {}
    first_metrics = list(metrics.iloc[0])
    for y, ((label, group_metrics), row) in enumerate(zip(metrics.items(), axes, strict=True)):
        part = frame[frame["group"] == label]
        for ax in row[len(group_metrics) :]:
            ax.set_visible(False)
        # Where groups have other metrics than the first each panel has its own heading.
        with_titles = y == 0 or list(group_metrics) != first_metrics
        for ax, metric in zip(row, group_metrics, strict=False):
            curves = part[part["metric"] == metric]
            handles |= _draw_responses(ax, curves, settings)
            if with_titles:
                ax.set_title(_metric_title(str(metric), curves["better"].iloc[0]), fontsize=7)
        text = f"step {number_range(part['step'])}, n = {number_range(part['n'])}"
        tint = style.colour(str(part["backbone"].iloc[0]))
        row[0].set_ylabel(f"{names[str(label)]}\n{text}", color=tint)
    _set_setting_ticks(axes, settings)
    columns = min(4, len(handles))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=columns)
    frame = frame.rename(columns={"group": "panel"})
    return Plot.of("response", figure, frame, names=shared_label(names))


def _in_first_features(frame: pd.DataFrame) -> pd.DataFrame:
    """Return distances, and shares in the features of each group's first metric."""
    features = frame["metric"].str.partition(" (")[2]
    first = features.groupby(frame["group"]).transform("first")
    return frame[(features == first) | frame["metric"].str.match("FI?D")]


def _metric_title(metric: str, better: str | None) -> str:
    name, _, features = metric.partition(" (")
    arrow = {"lower": " \u2193", "higher": " \u2191"}.get(str(better), "")
    return f"{name}{arrow}\n{features.removesuffix(')')}"


def _set_setting_ticks(axes: np.ndarray, settings: Sequence[str]) -> None:
    # Labels: the first setting in full, then the scale alone.
    ticks = [settings[0], *(name.removeprefix("CFG ") for name in settings[1:])]
    for ax in axes.flat:
        ax.set_xticks(range(len(settings)), ticks)
        ax.tick_params(axis="x", labelrotation=90)
        ax.margins(x=0.08)
    for column in axes.T:  # where the lowest line has fewer panels, the one above says the scales
        visible = [ax for ax in column if ax.get_visible()]
        visible[-1].tick_params(axis="x", labelbottom=True)


def _draw_responses(ax: Axes, frame: pd.DataFrame, settings: list[str]) -> dict[str, Any]:
    """Draw a curve per variant of one metric; return their handles by label."""
    handles = {}
    for variant, curve in frame.groupby("variant", sort=False):
        backbone = str(curve["backbone"].iloc[0])
        is_dense = variant == DENSE
        label = DENSE if is_dense else f"{backbone}, {variant}"
        tint = style.DENSE_COLOUR if is_dense else style.colour(backbone)
        look = style.line(str(variant)) | {"color": tint, "capsize": 1.5, "elinewidth": 0.8}
        points = curve.assign(x=curve["setting"].map(settings.index)).sort_values("x")
        scaled = points["setting"].str.startswith("CFG")
        for part, linestyle in ((points[~scaled], "none"), (points[scaled], look["linestyle"])):
            if not part.empty:
                error = part["std"].astype(float).fillna(0.0)
                styled_look = look | {"linestyle": linestyle}
                # The legend shows the line of CFG, which is drawn last.
                handles[label] = ax.errorbar(part["x"], part["mean"], yerr=error, **styled_look)
    return handles
