"""The effective guidance scale by noise level, as stored beside runs."""

import dataclasses
from collections.abc import Sequence
from textwrap import fill
from typing import Any, NamedTuple, cast

import pandas as pd
from matplotlib.axes import Axes

from analysis.comparison.aggregation import DENSE, ENOUGH_SEEDS, number_range, paired
from analysis.comparison.results import Results
from analysis.figures import style
from analysis.figures.style import Plot, styled
from analysis.measurements.guidance_scale_file import FORMS, NUMBERS
from analysis.tables.guidance_scale import scale_rows, stored_scales

_KEYS = ["setting", "route", "pair"]


class _Line(NamedTuple):
    """A line of panels: one configuration after one number of steps."""

    name: str
    form: str  # of the scale, `plain` or `instrumented`
    rows: pd.DataFrame
    differences: pd.DataFrame


def guidance_scale(results: Results) -> Plot | None:
    """Draw the scales that were stored beside the runs; None without one."""
    return effective_scale(stored_scales(results))


@styled
def effective_scale(files: Sequence[dict[str, Any]]) -> Plot | None:
    """Draw stored scales, a line of panels per configuration and steps; None without one.

    Left: the scale by noise level. Right: what a route changes, paired with the dense run of each
    seed; its interval is far narrower than the spread of either side.
    """
    frame = scale_rows(files)
    if frame.empty:
        return None
    steps = frame["step"].map("{:.0f}".format)
    curves = frame.assign(panel=frame["config"] + ", after " + steps + " steps")
    curves = curves[curves["pair"].isin(("dense", "routed")) & curves["level"].notna()]
    curves = curves.astype(dict.fromkeys(NUMBERS, float))
    lines = []
    for name, rows in curves.groupby("panel", sort=False):
        form = _form(rows)
        if form is not None:
            lines.append(_Line(str(name), form, rows, _differences(rows, form)))
    if not lines:
        return None
    has_differences = any(not line.differences.empty for line in lines)
    figure, axes = style.canvas(2.4 * len(lines), len(lines), 2 if has_differences else 1)
    panels_of_model = curves.groupby(["backbone", "data"])["panel"].nunique()
    for line, row in zip(lines, axes, strict=True):
        backbone, data = map(str, line.rows[["backbone", "data"]].iloc[0])
        title = f"{backbone}, {data}"
        if panels_of_model[backbone, data] > 1:
            title = fill(line.name, 48)
        _draw_scales(row[0], line.rows, line.form)
        row[0].set_title(title, color=style.colour(backbone))
        for ax in row[1:]:
            ax.set_visible(not line.differences.empty)
            _draw_differences(ax, line.differences)
        for ax in row:
            levels = sorted(line.rows["level"].unique())
            ax.set_xscale("log")
            ax.set_xticks(levels, [f"{level:.3g}" for level in levels])
            ax.minorticks_off()
            ax.set_xlabel("noise level: sigma over the data's std")
    return Plot.of("guidance_scale", figure, frame.drop(columns=["config"]))


def _form(rows: pd.DataFrame) -> str | None:
    """Return the form to draw: the instrumented one, without an instrument the plain one."""
    for form in reversed(FORMS):
        if rows[form].notna().any():
            return form
    return None


def _differences(rows: pd.DataFrame, form: str) -> pd.DataFrame:
    """Return routed minus dense runs of the same seed by setting, pass and noise level.

    Columns: setting, route, pair, level, backbone, mean, low, high, n. Empty without dense runs, or
    where several dense runs share a seed.
    """
    is_dense = (rows["route"] == "none") & (rows["pair"] == "dense")
    dense = rows[is_dense].dropna(subset=[form])
    if dense.duplicated(["seed", "level"]).any():
        return pd.DataFrame()
    routed = rows[rows["route"] != "none"].dropna(subset=[form])
    differences = []
    for keys, part in routed.groupby([*_KEYS, "level"], sort=False):
        setting, route, pair, level = cast(tuple[str, str, str, float], keys)
        reference = dense[dense["level"] == level].set_index("seed")[form].to_dict()
        difference = paired(reference, part.set_index("seed")[form].to_dict())
        if difference is not None:
            row = {"setting": setting, "route": route, "pair": pair, "level": level}
            row["backbone"] = part["backbone"].iloc[0]
            differences.append({**row, **dataclasses.asdict(difference)})
    return pd.DataFrame(differences)


def _line_name(setting: str, route: str, pair: str, step: float) -> str:
    name = "dense model" if route == "none" else f"route {route}, {pair} pass"
    # The run's name distinguishes two runs of one setting and seed.
    return fill(name + setting.partition(f"{step:.0f} steps")[2], 40)


def _look(route: str, pair: str, backbone: str) -> dict[str, Any]:
    if route == "none":
        return style.line(DENSE) | {"color": style.DENSE_COLOUR}
    # The dense pass of a routed model is drawn with the guideline's line style.
    return style.line("2-8" if pair == "dense" else pair) | {"color": style.colour(backbone)}


def _draw_scales(ax: Axes, rows: pd.DataFrame, form: str) -> None:
    """Draw the mean over seeds of every setting and pass; of a single seed its bootstrap band."""
    step = float(rows["step"].iloc[0])
    ax.axhline(1, color="#999999", linewidth=0.8, zorder=1)
    for keys, part in rows.groupby(_KEYS, sort=False):
        setting, route, pair = map(str, cast(tuple[str, ...], keys))
        look = _look(route, pair, str(part["backbone"].iloc[0]))
        seeds, levels = part["seed"].nunique(), part.groupby("level")
        label = f"{_line_name(setting, route, pair, step)} (n={seeds})"
        ax.plot(levels[form].mean(), label=label, **look)
        if seeds == 1:
            low, high = levels[f"{form}_low"].first(), levels[f"{form}_high"].first()
            ax.fill_between(low.index, low, high, color=look["color"], alpha=0.15, linewidth=0)
    ax.set_ylabel(f"w_eff, {form}")
    ax.legend(frameon=False)


def _draw_differences(ax: Axes, differences: pd.DataFrame) -> None:
    """Draw routed minus dense runs, paired by seed, with the 95 % interval of three or more."""
    ax.axhline(0, color=style.DENSE_COLOUR, linewidth=0.8, linestyle=(0, (4, 2)), zorder=1)
    if differences.empty:
        return
    groups = differences.groupby(_KEYS, sort=False)
    for index, (keys, part) in enumerate(groups):
        _, route, pair = map(str, cast(tuple[str, ...], keys))
        # Beside each other: intervals of two passes would hide one another.
        x = part["level"] * 1.05 ** (index - (len(groups) - 1) / 2)
        half = ((part["high"] - part["low"]) / 2).astype(float)
        look = _look(route, pair, str(part["backbone"].iloc[0]))
        look |= {"capsize": 2, "elinewidth": 0.8}
        ax.errorbar(x, part["mean"], yerr=half.where(part["n"] >= ENOUGH_SEEDS, 0.0), **look)
    ax.set_ylabel("\u0394 w_eff, routed \u2212 dense")
    ax.set_title(f"paired by seed (n={number_range(differences['n'])})", fontweight="normal")
