"""Convergence against steps and multiply-adds."""

from collections.abc import Iterable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, MaxNLocator

from analysis.comparison.aggregation import DENSE, ENOUGH_SEEDS, estimates
from analysis.comparison.groups import Group, Variant
from analysis.comparison.results import Results
from analysis.figures import style
from analysis.figures.style import Plot, styled
from analysis.runs.grouping import shared_label, short_labels
from analysis.tables.entries import metric_label
from analysis.tables.speedup import reach, speedup

COSTS = (("step", "training steps"), ("macs", "training multiply-adds"))
_MOST_GROUPS = 5  # on one page
# A variant with the mean of its scores: columns step, macs, mean, std, low, high, n.
Curve = tuple[Variant, pd.DataFrame]


def paired_seeds(dense: Variant, routed: Variant) -> list[int]:
    """Return the seeds whose dense and routed runs were both scored more than once.

    Those that were scored at their end alone say nothing about the way there.
    """
    seeds = []
    for seed, curve in dense.curves.items():
        if len(curve) > 1 and len(routed.curves.get(seed, ())) > 1:
            seeds.append(seed)
    return seeds


def paired_curves(dense: Variant, routed: Variant) -> list[Curve]:
    """Return both variants' means over the same seeds, at the steps that all of them have.

    No curves where a variant has fewer than two points.
    """
    seeds = paired_seeds(dense, routed)
    curves = []
    for variant in (dense, routed) if seeds else ():
        points = pd.concat([variant.curves[seed] for seed in seeds], ignore_index=True)
        means = estimates(points, ["step"], "value")
        means = means.merge(points.groupby("step")["macs"].mean().reset_index(), on="step")
        means = means[means["n"] == len(seeds)].sort_values("step")
        if len(means) > 1:
            curves.append((variant, means))
    return curves if len(curves) == 2 else []


def seeds_text(variant: Variant, means: pd.DataFrame) -> str:
    """Return the seeds behind a curve, `n=3`, or `n=3 of 5` where tables have more."""
    drawn, scored = int(means["n"].max()), len(variant.by_seed())
    return f"n={drawn} of {scored}" if scored > drawn else f"n={drawn}"


def point_count(curves: Iterable[Curve]) -> int:
    """Return the number of scores behind curves."""
    return sum(len(means) * int(means["n"].iloc[0]) for _, means in curves)


def _pairs(results: Results) -> list[tuple[Group, list[Curve]]]:
    """Return every group whose dense runs and guideline's route share seeds scored on the way."""
    pairs = []
    for group in results.groups:
        dense, routed = group.baseline, group.guideline()
        curves = paired_curves(dense, routed) if dense and routed else []
        if curves:
            pairs.append((group, curves))
    return pairs


@styled
def convergence(results: Results) -> Plot | None:
    """Draw dense against the guideline's route for every group scored more than once; else None."""
    pairs = _pairs(results)
    if not pairs:
        return None
    shown, more = style.fitting(pairs, _MOST_GROUPS, lambda pair: point_count(pair[1]))
    log = is_wide(curve for _, curves in shown for curve in curves)
    figure, axes = style.canvas(1.72 * len(shown), len(shown), len(COSTS), sharey="row")
    names = short_labels(group.label for group, _ in pairs)
    for (group, curves), row in zip(shown, axes, strict=True):
        for ax, (key, label) in zip(row, COSTS, strict=True):
            for variant, means in curves:
                draw_curve(ax, group, variant, means, means[key], variant.name)
            set_scales(ax, key, log)
            ax.set_xlabel(f"{label}\n{_draw_arrow(ax, group, curves, key)}")
        row[0].set_ylabel(axis_label(group.metric))
        row[0].set_title(names[group.label], color=style.colour(group.backbone))
        # Beside the title, above the panels: it would hide curves.
        legend = row[-1].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderpad=0)
        legend.set_in_layout(False)
    rows = []
    for group, curves in pairs:
        for variant, means in curves:
            rows.append(means.assign(panel=group.label, variant=variant.name, metric=group.metric))
    data = pd.concat(rows, ignore_index=True)
    shared = shared_label(group.label for group, _ in pairs)
    return Plot.of("convergence", figure, data, names=shared, more=more)


def axis_label(metric: str) -> str:
    """Return a metric's name for an axis: the feature space on a line of its own."""
    return metric_label(metric).replace(" (", "\n(")


def draw_curve(
    ax: Axes, group: Group, variant: Variant, means: pd.DataFrame, x: pd.Series, label: str
) -> None:
    """Draw a variant's mean over seeds with its 95 % band, from three seeds on."""
    shade = style.DENSE_COLOUR if variant.name == DENSE else style.colour(group.backbone)
    label = f"{label} ({seeds_text(variant, means)})"
    ax.plot(x, means["mean"], color=shade, label=label, **style.line(variant.name))
    if means["n"].max() >= ENOUGH_SEEDS:
        ax.fill_between(x, means["low"], means["high"], color=shade, alpha=0.15, linewidth=0)


def is_wide(curves: Iterable[Curve]) -> bool:
    """Return whether scores span so much that a logarithmic axis shows them better."""
    widest = 0.0
    for _, means in curves:
        if means["mean"].min() <= 0:
            return False
        widest = max(widest, means["mean"].max() / means["mean"].min())
    return widest > 3


def set_scales(ax: Axes, key: str, log: bool) -> None:
    """Give an axis few round ticks from 0 on, and scores plain numbers on a logarithmic one."""
    # A margin keeps the last point off the frame; runs that logged no cost have no points.
    ax.set_xlim(0, 1.05 * ax.dataLim.x1 if np.isfinite(ax.dataLim.x1) else None)
    ax.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    if key == "macs":
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    if log:
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter(lambda x, _: f"{x:g}" if f"{x:g}"[0] in "235" else "")
        ax.tick_params(axis="y", which="minor", labelsize=7, length=1.5)


def _draw_arrow(ax: Axes, group: Group, curves: list[Curve], key: str) -> str:
    """Draw how much earlier the route is at the dense run's best score; return it in words."""
    (dense, dense_means), (routed, _) = curves
    spent = reach(group, dense, routed).loc[paired_seeds(dense, routed)]
    factor = speedup(spent, key)
    scores = dense_means["mean"]
    best = scores.min() if group.better == "lower" else scores.max()
    ax.axhline(best, color="#999999", linewidth=0.7, linestyle=":")
    reached = spent[spent["reached"].astype(bool)]
    seeds = f"{len(reached)} of {len(spent)} seeds"
    if factor.is_missing:
        return "cost not logged"
    if factor.value is None:
        return "dense best not reached"
    if factor.few:
        return f"dense best reached by {seeds}"
    start, end = float(reached[f"dense_{key}"].mean()), float(reached[f"routed_{key}"].mean())
    arrow = {"arrowstyle": "-|>", "color": "#1a1a1a", "lw": 1.1, "shrinkA": 2, "shrinkB": 2}
    ax.annotate("", xy=(end, best), xytext=(start, best), arrowprops=arrow, zorder=5)
    return f"{factor.value:.1f}x to dense best ({seeds})"
