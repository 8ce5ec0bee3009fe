"""Guidance: responses to its scale, and maps of two rates (SG, Figs. 4 to 8)."""

import math
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes

from analysis.comparison.aggregation import half_width, mean_std, number_range
from analysis.comparison.groups import Group, Variant
from analysis.comparison.guidance_settings import number, parse
from analysis.comparison.results import Results
from analysis.figures import style
from analysis.figures.style import Plot, styled
from analysis.runs.grouping import shared_label, short_labels
from analysis.tables.entries import metric_decimals, metric_label
from analysis.tables.guidance import by_seed, evaluations

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
