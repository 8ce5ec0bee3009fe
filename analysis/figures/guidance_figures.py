"""Guidance: responses to its scale, maps of two rates (SG, Figs. 4 to 8), the effective scale."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from textwrap import fill
from typing import Any, cast

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes

from analysis.figures import style
from analysis.figures.style import Plot, styled
from analysis.runs.cells import Study
from analysis.runs.grouping import shared, short
from analysis.runs.seed_statistics import ENOUGH_SEEDS, extent, mean_std, paired
from analysis.tables import guidance_table
from analysis.tables.table import metric_decimals, metric_label

# Maps on one page.
_MAPS = 6


def _rates(text: str) -> dict[str, float | None]:
    """Return scale and rates of routed guidance; under anything more it has no place in a map."""
    kind, options = guidance_table.parse(text)
    rates = {key: guidance_table.number(options.get(key)) for key in ("scale", "strong", "weak")}
    plain = kind == "routed" and options.keys() <= {*rates, "route"}
    return rates if plain and None not in rates.values() else {}


@styled
def guidance(study: Study) -> Plot | None:
    """Draw a map per cell and scale that was scored at four or more pairs of rates; else None."""
    rows: list[dict[str, Any]] = []
    for base, cell in ((one, cell) for one in study.bases for cell in one.cells):
        scored = guidance_table.evaluations(study, base, cell, wanted=_rates)
        own = {"panel": base.label, "treatment": cell.treatment, "better": base.better}
        for text, part in () if scored.empty else scored.groupby("guidance"):
            if mean := mean_std(list(guidance_table.by_seed(part).values())):
                metric, step = part[["metric", "step"]].iloc[0]
                model = {"backbone": base.backbone, "metric": metric, **_rates(str(text))}
                score = {"value": mean.mean, "std": mean.std, "n": mean.n, "step": int(step)}
                rows.append({**own, **model, **score})
    if not rows:
        return None
    frame = pd.DataFrame(rows)
    groups = frame.groupby(["panel", "treatment", "scale"], sort=False)
    found = [(key, part) for key, part in groups if len(part) >= 4]
    if not found:
        return None
    shown, more = style.some(found, _MAPS, lambda item: len(item[1]))
    figure, axes = style.panels(len(shown), 2, 2.5)
    names = short(str(panel) for (panel, *_), _ in found)
    for ax, ((panel, treatment, scale), part) in zip(axes.flat, shown, strict=False):
        # Maps of one model have one scale of colours: a flat map looks flat.
        same = frame[(frame["panel"] == panel) & frame["metric"].isin(part["metric"])]
        _guidance_map(ax, part, _colour_range(same))
        said = f"{treatment}, w={scale:g}, step {part['step'].iloc[0]}, n={extent(part['n'])}"
        tint = style.colour(str(part["backbone"].iloc[0]))
        ax.set_title(f"{fill(names[str(panel)], 48)}\n{said}", color=tint)
    return Plot.of("guidance", figure, frame, names=shared(names), more=more)


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


def _guidance_map(ax: Axes, part: pd.DataFrame, ends: tuple[float, float]) -> None:
    known = {(row["strong"], row["weak"]): row for row in part.to_dict("records")}
    rows, columns = (sorted(set(part[name])) for name in ("strong", "weak"))
    rows.reverse()
    values = [[known.get((y, x), {}).get("value", np.nan) for x in columns] for y in rows]
    ax.set_facecolor("#f2f2f2")
    higher, digits = part["better"].iloc[0] == "higher", metric_decimals(part["metric"].iloc[0])
    # The dark end is the better one.
    cmap = colormaps["viridis_r" if higher else "viridis"]
    image = ax.imshow(values, cmap=cmap, vmin=ends[0], vmax=ends[1], aspect="auto", zorder=1)
    for (y, strong), (x, weak) in itertools.product(enumerate(rows), enumerate(columns)):
        if (strong, weak) not in known:
            style.centred(ax, x, y, "\u00d7", color="#999999")
            continue
        value, std = (known[strong, weak][name] for name in ("value", "std"))
        text = f"{value:.{digits}f}" + ("" if pd.isna(std) else f"\n\u00b1{std:.{digits}f}")
        ink = style.ink(cmap(image.norm(value)))
        style.centred(ax, x, y, text, color=ink, fontsize=7, linespacing=1.1)
    ax.set_xticks(range(len(columns)), [f"{v:g}" for v in columns])
    ax.set_yticks(range(len(rows)), [f"{v:g}" for v in rows])
    ax.set(xlabel="rate of the weak pass", ylabel="rate of the strong pass")
    ax.grid(False)
    ax.figure.colorbar(image, ax=ax, label=metric_label(str(part["metric"].iloc[0])), pad=0.02)


@styled
def response(study: Study) -> Plot | None:
    """Draw a line of panels per base, a panel a metric; None without scores under three settings.

    Every panel has the settings at equal distances: the scales of CFG joined by a line, then SG and
    routed inference, which are no points of that line.
    """
    frame = guidance_table.responses(study)
    if frame.empty:
        return None
    # Beside the distances, the shares in the features of the first one: more do not fit the page.
    first = frame.groupby("base")["metric"].transform("first").str.partition(" (")[2]
    own = frame["metric"].str.partition(" (")[2] == first
    frame = frame[own | frame["metric"].str.match("FI?D")]
    settings = sorted(set(frame["setting"]), key=guidance_table.setting_order)
    names = short(frame["panel"])
    bases = list(dict.fromkeys(zip(frame["base"], frame["panel"], strict=True)))
    metrics = frame.groupby("base", sort=False)["metric"].unique()
    columns = max(map(len, metrics))
    figure, axes = style.canvas(1.35 * len(bases) + 0.75, len(bases), columns, sharex=True)
    handles: dict[str, Any] = {}
    ticks = [name.removeprefix("CFG ") if i else name for i, name in enumerate(settings)]
    for (key, panel), row in zip(bases, axes, strict=True):
        mine = frame[frame["base"] == key]
        for ax in row[len(metrics[key]) :]:
            ax.set_visible(False)
        for ax, metric in zip(row, metrics[key], strict=False):
            part = mine[mine["metric"] == metric]
            for tokens, curve in part.groupby("treatment", sort=False):
                label = "dense" if tokens == "dense" else f"{curve['backbone'].iloc[0]}, {tokens}"
                handles[label] = _curve(ax, curve, settings, str(tokens))
            if key == bases[0][0] or metrics[key].tolist() != metrics.iloc[0].tolist():
                label, _, space = str(metric).partition(" (")
                arrow = {"lower": " \u2193", "higher": " \u2191"}.get(part["better"].iloc[0], "")
                ax.set_title(f"{label}{arrow}\n{space.removesuffix(')')}", fontsize=7)
        about = f"{names[panel]}\nstep {extent(mine['step'])}, n = {extent(mine['n'])}"
        row[0].set_ylabel(about, color=style.colour(str(mine["backbone"].iloc[0])))
    for ax in axes.flat:
        ax.set_xticks(range(len(settings)), ticks)
        ax.tick_params(axis="x", labelrotation=90)
        ax.margins(x=0.08)
    for column in axes.T:  # where the lowest line has fewer panels, the one above says the scales
        [ax for ax in column if ax.get_visible()][-1].tick_params(axis="x", labelbottom=True)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=min(4, len(handles)))
    return Plot.of("response", figure, frame, names=shared(names))


def _curve(ax: Axes, curve: pd.DataFrame, settings: list[str], tokens: str) -> Any:
    known = curve.set_index("setting")
    found = known.assign(x=[settings.index(name) for name in known.index]).sort_values("x")
    tint = style.DENSE_COLOUR if tokens == "dense" else style.colour(str(curve["backbone"].iloc[0]))
    look = style.line(tokens) | {"color": tint, "capsize": 1.5, "elinewidth": 0.8}
    scaled = found.index.str.startswith("CFG")
    drawn = None
    for part, own in ((found[scaled], look), (found[~scaled], look | {"linestyle": "none"})):
        if not part.empty:
            error = part["std"].astype(float).fillna(0.0)
            bars = ax.errorbar(part["x"], part["mean"], yerr=error, **own)
            drawn = drawn or bars
    return drawn


@styled
def draw(files: Sequence[dict[str, Any]]) -> Plot | None:
    """Draw what `analysis.guidance_scale` stored, a line of panels per recipe and steps; or None.

    Left: the scale by noise level. Right: what a route changes, paired with the dense run of each
    seed; its interval is far narrower than the spread of either side.
    """
    frame = guidance_table.scale_rows(files)
    frame["panel"] = [f"{row.recipe}, after {row.step:.0f} steps" for row in frame.itertuples()]
    curves = frame[frame["pair"].isin(("dense", "routed")) & frame["level"].notna()]
    curves = curves.astype({name: float for name in guidance_table.NUMBERS})
    rivals = curves.groupby(["backbone", "data"])["panel"].transform("nunique")
    groups = []
    for panel, part in curves.groupby("panel", sort=False):
        # The instrumented form is the one to read; without an instrument there is the plain one.
        form = next(
            (name for name in reversed(guidance_table.FORMS) if part[name].notna().any()), None
        )
        if form is not None:
            groups.append((str(panel), form, part, _scale_differences(part, form)))
    if not groups:
        return None
    columns = 2 if any(not differences.empty for *_, differences in groups) else 1
    figure, axes = style.canvas(2.4 * len(groups), len(groups), columns)
    for (panel, form, part, differences), row in zip(groups, axes, strict=True):
        backbone, data = map(str, part[["backbone", "data"]].iloc[0])
        _scale_lines(row[0], part, form)
        title = fill(panel, 48) if rivals[part.index[0]] > 1 else f"{backbone}, {data}"
        row[0].set_title(title, color=style.colour(backbone))
        for ax in row[1:]:
            ax.set_visible(not differences.empty)
            _scale_contrasts(ax, differences)
        for ax in row:
            places = sorted(part["level"].unique())
            ax.set_xscale("log")
            ax.set_xticks(places, [f"{place:.3g}" for place in places])
            ax.minorticks_off()
            ax.set_xlabel("noise level: sigma over the data's std")
    return Plot.of("guidance_scale", figure, frame.drop(columns=["panel", "recipe"]))


def _scale_differences(part: pd.DataFrame, form: str) -> pd.DataFrame:
    """Return routed minus dense runs of the same seed by setting, pass and noise level.

    Columns: those three, backbone, mean, low, high, n. Empty without dense runs, or where several
    dense runs share a seed.
    """
    dense = part[(part["route"] == "none") & (part["pair"] == "dense")].dropna(subset=[form])
    rows = []
    if not dense.duplicated(["seed", "level"]).any():
        routed = part[part["route"] != "none"].dropna(subset=[form])
        for keys, same in routed.groupby(["setting", "route", "pair", "level"], sort=False):
            setting, route, pair, level = cast(tuple[str, str, str, float], keys)
            reference = dense[dense["level"] == level].set_index("seed")[form].to_dict()
            difference = paired(reference, same.set_index("seed")[form].to_dict())
            if difference is not None:
                about = {"setting": setting, "route": route, "pair": pair, "level": level}
                about["backbone"] = same["backbone"].iloc[0]
                rows.append({**about, **dataclasses.asdict(difference)})
    return pd.DataFrame(rows)


def _scale_name(setting: str, route: str, pair: str, step: float) -> str:
    name = "dense model" if route == "none" else f"route {route}, {pair} pass"
    # A run that has a rival of its own setting and seed is told apart by its name.
    return fill(name + setting.partition(f"{step:.0f} steps")[2], 40)


def _scale_look(route: str, pair: str, backbone: str) -> dict[str, Any]:
    dense = route == "none"
    look = style.line("dense" if dense else "2-8" if pair == "dense" else pair)
    return look | {"color": style.DENSE_COLOUR if dense else style.colour(backbone)}


def _scale_lines(ax: Axes, part: pd.DataFrame, form: str) -> None:
    """Draw the mean over seeds of every setting and pass; of a single seed its bootstrap band."""
    step = float(part["step"].iloc[0])
    ax.axhline(1, color="#999999", linewidth=0.8, zorder=1)
    for keys, same in part.groupby(["setting", "route", "pair"], sort=False):
        setting, route, pair = map(str, cast(tuple[str, ...], keys))
        look = _scale_look(route, pair, str(part["backbone"].iloc[0]))
        seeds, levels = same["seed"].nunique(), same.groupby("level")
        label = f"{_scale_name(setting, route, pair, step)} (n={seeds})"
        ax.plot(levels[form].mean(), label=label, **look)
        if seeds == 1:
            low, high = (levels[f"{form}_{end}"].first() for end in ("low", "high"))
            ax.fill_between(low.index, low, high, color=look["color"], alpha=0.15, linewidth=0)
    ax.set_ylabel(f"w_eff, {form}")
    ax.legend(frameon=False)


def _scale_contrasts(ax: Axes, differences: pd.DataFrame) -> None:
    """Draw routed minus dense runs, paired by seed, with the 95 % interval of three or more."""
    ax.axhline(0, color=style.DENSE_COLOUR, linewidth=0.8, linestyle=(0, (4, 2)), zorder=1)
    if differences.empty:
        return
    groups = differences.groupby(["setting", "route", "pair"], sort=False)
    for place, (keys, same) in enumerate(groups):
        _, route, pair = map(str, cast(tuple[str, ...], keys))
        # Beside each other: intervals of two passes would hide one another.
        x = same["level"] * 1.05 ** (place - (len(groups) - 1) / 2)
        half = ((same["high"] - same["low"]) / 2).astype(float)
        look = _scale_look(route, pair, str(same["backbone"].iloc[0]))
        look |= {"capsize": 2, "elinewidth": 0.8}
        ax.errorbar(x, same["mean"], yerr=half.where(same["n"] >= ENOUGH_SEEDS, 0.0), **look)
    ax.set_ylabel("\u0394 w_eff, routed \u2212 dense")
    ax.set_title(f"paired by seed (n={extent(differences['n'])})", fontweight="normal")
