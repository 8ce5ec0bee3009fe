"""The step penalty s(N) by backbone, and where routing pays."""

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
    figure, axes = style.panels(len(shown), 3, 2.2, sharey=True)
    labels = [pair.group.label for pair in pairs]
    names = short_labels(labels)
    frames = []
    for ax, pair in zip(axes.flat, shown, strict=False):
        _draw_penalty(ax, pair)
        tint = style.colour(pair.group.backbone)
        count = len(pair.last_steps)
        ax.set_title(f"{names[pair.group.label]}\nroute {pair.routed.name}, n={count}", color=tint)
        frames.append(pair.rows().assign(group=pair.group.label, variant=pair.routed.name))
    for ax in axes[:, 0]:
        ax.set_ylabel("step penalty s(N)")
    data = pd.concat(frames, ignore_index=True)
    return Plot.of("step_penalty", figure, data, names=shared_label(labels), more=more)


def _draw_penalty(ax: Axes, pair: PairPenalty) -> None:
    """Draw the mean with its interval, censored seeds at their bound, and the line 1/m."""
    tint = style.colour(pair.group.backbone)
    means = {step: penalty.s for step, penalty in pair.by_step.items() if penalty.s is not None}
    frame = pd.DataFrame(list(means.values()), list(means), ["mean", "low", "high"])
    ax.plot(frame["mean"], color=tint, marker="s", label="s, mean")
    if len(pair.last_steps) >= ENOUGH_SEEDS:
        low, high = frame["low"], frame["high"]
        ax.fill_between(frame.index, low, high, color=tint, alpha=0.15, linewidth=0)
    rows = pair.rows()
    censored = rows[rows["censored"]]
    if len(censored):
        ax.plot(
            censored["step"], censored["bound"], color=tint, marker="^", markerfacecolor="white",
            linestyle="none", label="censored: s is larger",
        )  # fmt: skip
    ax.axhline(1 / pair.m, color=style.DENSE_COLOUR, linestyle=":", label=f"1/m = {1 / pair.m:.2f}")
    ax.set_xscale("log")
    steps = sorted(pair.by_step)
    chosen = [steps[0], steps[-1]] if len(steps) > 4 else steps
    ax.set_xticks(chosen)
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("N, dense steps")
    ax.legend(frameon=False, fontsize=7)
