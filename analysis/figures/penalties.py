"""The step penalty s(N) by backbone, and where routing pays."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, NullFormatter

from analysis.comparison.aggregation import ENOUGH_SEEDS
from analysis.comparison.pair_penalty import PairPenalty, pair_penalties
from analysis.comparison.results import Results
from analysis.figures import style
from analysis.figures.style import Plot, styled
from analysis.runs.grouping import shared_label, short_labels

_MOST_PANELS = 6


@styled
def step_penalty(results: Results) -> Plot | None:
    """Draw s(N) against N, a panel per group; None where no pair logged losses on the way."""
    pairs = pair_penalties(results)
    if not pairs:
        return None
    shown, more = style.fitting(pairs, _MOST_PANELS, lambda pair: len(pair.by_step))
    # The legend below the panels has a line, or three of the width of one panel.
    legend_columns = 1 if len(shown) == 1 else 3
    height = 2.2 + 0.6 / legend_columns / -(-len(shown) // 3)
    figure, axes = style.panels(len(shown), 3, height, sharey=True)
    labels = [pair.group.label for pair in pairs]
    names = short_labels(labels)
    frames = []
    handles: dict[str, Any] = {}
    for ax, pair in zip(axes.flat, shown, strict=False):
        handles |= _draw_penalty(ax, pair)
        title = f"route {pair.routed.name}, n={len(pair.last_steps)}, 1/m={1 / pair.m:.2f}"
        tint = style.colour(pair.group.backbone)
        ax.set_title(f"{names[pair.group.label]}\n{title}", color=tint)
        frames.append(pair.rows().assign(group=pair.group.label, variant=pair.routed.name))
    for ax in axes[:, 0]:
        ax.set_ylabel("step penalty s(N)")
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=legend_columns)
    data = pd.concat(frames, ignore_index=True)
    return Plot.of("step_penalty", figure, data, names=shared_label(labels), more=more)


def _draw_penalty(ax: Axes, pair: PairPenalty) -> dict[str, Any]:
    """Draw the mean with its interval, censored seeds above their bound, and the line 1/m.

    Returns:
        The handles of the legend by label.
    """
    handles: dict[str, Any] = {}
    tint = style.colour(pair.group.backbone)
    steps = sorted(pair.by_step)
    means = {step: penalty.s for step, penalty in pair.by_step.items() if penalty.s is not None}
    frame = pd.DataFrame(list(means.values()), list(means), ["mean", "low", "high"])
    frame = frame.reindex(steps).astype(float)  # no line over a step without a mean
    (handles["s, mean over seeds"],) = ax.plot(frame["mean"], color=tint, marker="s")
    if len(pair.last_steps) >= ENOUGH_SEEDS:
        low, high = frame["low"], frame["high"]
        ax.fill_between(frame.index, low, high, color=tint, alpha=0.15, linewidth=0)
    rows = pair.rows()
    for row in rows[rows["censored"]].to_dict("records"):
        # Up to the frame: s is somewhere above, so that the bound does not look like a value.
        arrow = {"arrowstyle": "-|>", "color": tint, "linestyle": (0, (2, 2)), "shrinkA": 0}
        start, end = (row["step"], row["bound"]), (row["step"], 1)
        coordinates = ax.get_xaxis_transform()
        ax.annotate("", end, start, xycoords=coordinates, textcoords="data", arrowprops=arrow)
        (handles["censored: s is above the bar"],) = ax.plot(
            *start, color=tint, marker="_", markersize=8, linestyle="none"
        )
    line = ax.axhline(1 / pair.m, color=style.DENSE_COLOUR, linestyle=":")
    handles["1/m: equal multiply-adds"] = line
    ax.set_xscale("log")
    ax.set_xticks([steps[0], steps[-1]] if len(steps) > 4 else steps)
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("N, dense steps")
    return handles
