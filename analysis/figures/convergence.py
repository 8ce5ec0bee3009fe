"""Convergence against steps, multiply-adds and hours, with the speed-up as an arrow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, FixedLocator, MaxNLocator

from analysis.figures.style import Plot, canvas, colour, line, styled
from analysis.runs.cells import Base, Cell, Study, same_machine
from analysis.runs.statistics import ratio
from analysis.tables.equal_cost import reach
from analysis.tables.table import Entry

# Behind a text that stands on a line.
_PAPER = {"boxstyle": "square,pad=0.08", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
AXES = (("step", "training steps"), ("macs", "training multiply-adds"), ("hours", "training time"))


def mean_path(study: Study, base: Base, cell: Cell) -> pd.DataFrame:
    """Return a cell's mean over seeds at every step that all seeds were scored at.

    Seeds that were scored at their end alone say nothing about the way there, and are left out
    where others do.
    """
    known = list(study.by_seed(base, cell).values())
    paths = [path for path in known if len(path) > 1] or known
    if not paths:
        return pd.DataFrame()
    groups = pd.concat(paths, ignore_index=True).groupby("step")
    found = groups.agg(
        macs=("macs", "mean"),
        hours=("hours", "mean"),
        mean=("value", "mean"),
        std=("value", "std"),
        n=("value", "size"),
    )
    return found[found["n"] == len(paths)].reset_index()


def methods(base: Base) -> list[Cell]:
    """Return the dense cell, the guideline's route and the first cell of every other method."""
    found = [cell for cell in (base.dense, base.auto()) if cell is not None]
    rest: dict[str, Cell] = {}
    for cell in base.routed:
        name = str(cell.first("variant"))
        known = rest.get(name)
        if name != "TREAD" and (known is None or _seeds(base, cell) > _seeds(base, known)):
            rest[name] = cell
    return [*found, *rest.values()]


SEEDS = '"n=3 of 5": the others were scored at their end alone.'


def seeds(base: Base, cell: Cell, path: pd.DataFrame) -> str:
    """Return the seeds behind a curve, `n=3`, or `n=3 of 5` where tables have more."""
    drawn, known = int(path["n"].max()), _seeds(base, cell)
    return f"n={drawn}" + (f" of {known}" if known > drawn else "")


def _seeds(base: Base, cell: Cell) -> int:
    return len(cell.by_seed(base.score))


@styled
def convergence(study: Study) -> Plot | None:
    """Draw dense against routed for every base that was scored more than once; None without one.

    Dropping, masking and other methods of the same base are drawn too, the most replicated cell of
    each; its further routes, rates and selections are in figures of their own.
    """
    chosen: list[tuple[Base, list[tuple[Cell, pd.DataFrame]]]] = []
    for base in study.bases:
        drawn = [(cell, mean_path(study, base, cell)) for cell in methods(base)]
        paths = [(cell, path) for cell, path in drawn if len(path) > 1]
        if len(paths) > 1 and paths[0][0] is base.dense:
            chosen.append((base, paths))
    if not chosen:
        return None
    means = [path["mean"] for _, paths in chosen for _, path in paths]
    log = wide(means)
    figure, axes = canvas(9.4, 2.45 * len(chosen) + 0.1, len(chosen), 3, sharey="row")
    data = []
    for (base, paths), row in zip(chosen, axes, strict=True):
        for ax, (key, label) in zip(row, AXES, strict=True):
            _panel(ax, study, base, paths, key)
            ax.set_xlabel(label)
            _scales(ax, key, log)
        row[0].set_ylabel(base.metric)
        row[0].set_title(base.label, color=colour(str(base.any.first("backbone"))))
        # Names would hide the curves: they stand beside the last panel.
        row[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        data += [
            path.assign(panel=base.label, treatment=cell.treatment, metric=base.metric)
            for cell, path in paths
        ]
    return Plot(
        "convergence",
        "Convergence",
        "Mean over seeds; the band is one standard deviation. The arrow runs from the dense run's "
        "best score to where the legend's first routed run first scores as well, seed by seed; its "
        f"label is the geometric mean over the seeds that get there. {SEEDS}",
        figure,
        pd.concat(data, ignore_index=True),
    )


def _panel(
    ax: Axes, study: Study, base: Base, paths: list[tuple[Cell, pd.DataFrame]], key: str
) -> None:
    tint = colour(str(base.any.first("backbone")))
    for cell, path in paths:
        # One colour per backbone: further methods are told apart by line and marker.
        shade = "#555555" if cell.treatment == "dense" else tint
        label = f"{cell.treatment} ({seeds(base, cell, path)})"
        ax.plot(path[key], path["mean"], color=shade, label=label, **line(cell.treatment))
        spread = path["std"].fillna(0.0)
        ax.fill_between(
            path[key],
            path["mean"] - spread,
            path["mean"] + spread,
            color=shade,
            alpha=0.15,
            linewidth=0,
        )
    ax.set_xlim(left=0)
    _arrow(ax, study, base, paths, key)


def wide(means: Sequence[pd.Series]) -> bool:
    """Say whether scores span so much that a logarithmic axis shows them better."""
    return min(m.min() for m in means) > 0 and max(m.max() / m.min() for m in means) > 3


def log_scores(ax: Axes) -> None:
    """Make the axis of the scores logarithmic, with plain numbers at its ticks."""
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter(lambda x, _: f"{x:g}" if f"{x:g}"[0] in "235" else "")
    ax.tick_params(axis="y", which="minor", labelsize=7, length=1.5)


def _scales(ax: Axes, key: str, log: bool) -> None:
    if log:
        log_scores(ax)
    if key == "macs":
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    elif key == "hours" and ax.get_xlim()[1] < 2:
        unit, factor = ("min", 60) if ax.get_xlim()[1] > 1 / 30 else ("s", 3600)
        # Ticks at round numbers of the unit that is shown, not of the hours underneath.
        ax.xaxis.set_major_locator(
            FixedLocator([t / factor for t in _round(ax.get_xlim()[1] * factor)])
        )
        ax.xaxis.set_major_formatter(lambda x, _: f"{x * factor:g} {unit}")
    elif key == "hours":
        ax.xaxis.set_major_formatter("{x:g} h")


def _round(high: float) -> list[float]:
    return [float(t) for t in MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(0, high) if t <= high]


def _arrow(
    ax: Axes, study: Study, base: Base, paths: list[tuple[Cell, pd.DataFrame]], key: str
) -> None:
    (dense, first), (routed, _), *_ = paths
    reached = reach(study, base, dense, routed)
    there = [item for item in reached if item.routed is not None]
    factor = ratio([value for item in there if (value := item.factor(key)) is not None])
    if key == "hours" and not same_machine(dense, routed):
        # Two machines: the clock says nothing about the route.
        ax.text(0.03, 0.06, "two machines", transform=ax.transAxes, fontsize=7.5, color="#666666")
        return
    best = first["mean"].min() if base.better == "lower" else first["mean"].max()
    if factor is None:
        ax.axhline(best, color="#999999", linewidth=0.8, linestyle=":")
        ax.text(
            0.03,
            0.06,
            "dense best not reached",
            transform=ax.transAxes,
            fontsize=7.5,
            color="#666666",
            zorder=6,
            bbox=_PAPER,
        )
        return
    start = float(np.mean([item.dense[key] for item in there]))
    end = float(np.mean([item.routed[key] for item in there if item.routed]))
    arrow: dict[str, Any] = {
        "arrowstyle": "-|>",
        "color": "#1a1a1a",
        "lw": 1.1,
        "shrinkA": 2,
        "shrinkB": 2,
    }
    ax.annotate("", xy=(end, best), xytext=(start, best), arrowprops=arrow, zorder=5)
    few = Entry(value=factor.mean, n=factor.n, of=len(reached)).few
    some = f" ({len(there)}/{len(reached)})" if few or len(there) < len(reached) else ""
    ax.annotate(
        f"{factor.mean:.1f}x{some}",
        ((start + end) / 2, best),
        xytext=(0, 4),
        textcoords="offset points",
        ha="center",
        fontsize=8.5,
        fontweight="normal" if few else "bold",
        color="#1a1a1a",
        zorder=6,
        bbox=_PAPER,
    )
