"""FD and held-out loss against multiply-adds, and their paired differences to dense training."""

from __future__ import annotations

from typing import Any

import pandas as pd

from analysis.comparison.aggregation import interval
from analysis.figures.style import Plot, canvas, colour, line, styled

BACKBONES = ("dit", "mamba", "rwkv")
#: Panels: the score's column, its label, decimals of the difference.
SCORES = (("fd", "FD, 2,000 samples"), ("loss", "held-out loss"))
_CAPTION = (
    "Above: scores against training multiply-adds. Hollow: dense runs after {steps:,} steps; "
    "solid: the routed runs of the same seeds after as many steps and after {longer:,}, which "
    "cost .97 to 1.00 of the dense runs' multiply-adds. Below: routed minus dense of every seed "
    "(small) and their mean with its 95 % t-interval, at equal steps and at about equal "
    "multiply-adds."
)


@styled
def draw(points: pd.DataFrame, steps: int, longer: int) -> Plot:
    """Draw scores against multiply-adds, and paired differences to the dense runs.

    Args:
        points: Columns `backbone`, `route`, `seed`, `step`, `macs`, `fd` and `loss`.
        steps: Steps of the dense runs.
        longer: Steps of the routed runs at about equal multiply-adds.
    """
    figure, axes = canvas(5.2, 2, 2)
    rows: list[dict[str, Any]] = []
    for column, (score, label) in enumerate(SCORES):
        _curves(axes[0, column], points, score, steps)
        axes[0, column].set(xlabel="training multiply-adds (1e12)", ylabel=label)
        rows += _differences(axes[1, column], points, score, (steps, longer), steps)
        axes[1, column].set_ylabel(f"{label}: routed \u2212 dense")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncol=3)
    caption = _CAPTION.format(steps=steps, longer=longer)
    title = "FD and held-out loss against multiply-adds"
    return Plot("compute", title, caption, figure, pd.DataFrame(rows))


def _curves(ax: Any, points: pd.DataFrame, score: str, steps: int) -> None:
    for backbone in BACKBONES:
        part = points[points["backbone"] == backbone]
        dense = part[(part["route"] == "none") & (part["step"] == steps)]
        ax.plot(
            dense["macs"] / 1e12, dense[score], color=colour(backbone), ls="", ms=5,
            marker="o", markerfacecolor="white", label=f"{backbone}, dense",
        )  # fmt: skip
        for index, (_, run) in enumerate(part[part["route"] != "none"].groupby("seed")):
            label = f"{backbone}, routed" if index == 0 else None
            style = line("2-8") | {"linewidth": 0.9, "markersize": 3.5}
            ax.plot(run["macs"] / 1e12, run[score], color=colour(backbone), label=label, **style)


def _differences(
    ax: Any, points: pd.DataFrame, score: str, routed_steps: tuple[int, int], steps: int
) -> list[dict[str, Any]]:
    """Draw routed minus dense by backbone, once per routed length; return what was drawn."""
    rows, ticks = [], {}
    position = 0.0
    for backbone in BACKBONES:
        part = points[points["backbone"] == backbone]
        dense = part[(part["route"] == "none") & (part["step"] == steps)].set_index("seed")[score]
        for length, label in zip(routed_steps, ("equal\nsteps", "equal\nMACs"), strict=True):
            routed = part[(part["route"] != "none") & (part["step"] == length)]
            difference = (routed.set_index("seed")[score] - dense).dropna()
            estimate = interval(list(difference))
            if estimate is None or estimate.low is None or estimate.high is None:
                continue
            half = estimate.mean - estimate.low
            ax.plot([position - 0.18] * len(difference), difference, ".", ms=4, alpha=0.6,
                    color=colour(backbone))  # fmt: skip
            ax.errorbar(position, estimate.mean, half, fmt="s", ms=4, capsize=2.5,
                        color=colour(backbone))  # fmt: skip
            ticks[position] = label
            rows.append({
                "score": score, "backbone": backbone, "routed_steps": length, "n": estimate.n,
                "difference": estimate.mean, "low": estimate.low, "high": estimate.high,
            })  # fmt: skip
            position += 1
        position += 0.5
    ax.axhline(0, color="black", linewidth=0.7)
    ax.set_xticks(list(ticks), list(ticks.values()))
    return rows
