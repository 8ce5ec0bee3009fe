"""How scores respond to guidance: dense and routed over the scales of CFG, SG and routed."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from analysis.figures.style import DENSE_COLOUR, Plot, canvas, colour, line, styled
from analysis.runs.cells import Study
from analysis.runs.grouping import shared, short
from analysis.tables.guidance_table import responses, setting_order


@styled
def response(study: Study) -> Plot | None:
    """Draw a line of panels per base, a panel a metric; None without scores under three settings.

    Every panel has the settings at equal distances: the scales of CFG joined by a line, then SG and
    routed inference, which are no points of that line.
    """
    frame = responses(study)
    if frame.empty:
        return None
    # Beside the distances, the shares in the features of the first one: more do not fit the page.
    first = frame.groupby("base")["metric"].transform("first").str.partition(" (")[2]
    own = frame["metric"].str.partition(" (")[2] == first
    frame = frame[own | frame["metric"].str.match("FI?D")]
    settings = sorted(set(frame["setting"]), key=setting_order)
    names = short(frame["panel"])
    bases = list(dict.fromkeys(zip(frame["base"], frame["panel"], strict=True)))
    metrics = frame.groupby("base", sort=False)["metric"].unique()
    columns = max(map(len, metrics))
    height = 1.35 * len(bases) + 0.75
    figure, axes = canvas(height, len(bases), columns, sharex=True)
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
            if row is axes[0] or metrics[key].tolist() != metrics.iloc[0].tolist():
                label, _, space = str(metric).partition(" (")
                arrow = {"lower": " \u2193", "higher": " \u2191"}.get(part["better"].iloc[0], "")
                ax.set_title(f"{label}{arrow}\n{space.removesuffix(')')}", fontsize=7)
        seeds = "-".join(str(n) for n in sorted({mine["n"].min(), mine["n"].max()}))
        steps = "-".join(str(n) for n in sorted({mine["step"].min(), mine["step"].max()}))
        about = f"{names[panel]}\nstep {steps}, n = {seeds}"
        row[0].set_ylabel(about, color=colour(str(mine["backbone"].iloc[0])))
    for ax in axes.flat:
        ax.set_xticks(range(len(settings)), ticks)
        ax.tick_params(axis="x", labelrotation=90)
        ax.margins(x=0.08)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=min(4, len(handles)))
    return Plot.of("response", figure, frame, names=shared(names))


def _curve(ax: Axes, curve: pd.DataFrame, settings: list[str], tokens: str) -> Any:
    known = curve.set_index("setting")
    found = known.assign(x=[settings.index(name) for name in known.index]).sort_values("x")
    tint = DENSE_COLOUR if tokens == "dense" else colour(str(curve["backbone"].iloc[0]))
    style = line(tokens) | {"color": tint, "capsize": 1.5, "elinewidth": 0.8}
    scaled = found.index.str.startswith("CFG")
    drawn = None
    for part, look in ((found[scaled], style), (found[~scaled], style | {"linestyle": "none"})):
        if not part.empty:
            error = part["std"].astype(float).fillna(0.0)
            bars = ax.errorbar(part["x"], part["mean"], yerr=error, **look)
            drawn = drawn or bars
    return drawn
