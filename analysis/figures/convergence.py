"""Convergence against steps, multiply-adds and hours, and the overview with samples below it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, FixedLocator, MaxNLocator

from analysis.figures.sample_grids import Found, chosen
from analysis.figures.style import Options, Plot, canvas, colour, line, quiet, styled
from analysis.runs.cells import Base, Cell, Study, same_machine
from analysis.runs.statistics import ratio
from analysis.tables.equal_cost import reach
from analysis.tables.table import Entry

# Behind a text that stands on a line.
_PAPER = {"boxstyle": "square,pad=0.08", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
# Pictures of one class beside each other in a sample grid (experiments/training/evaluation.py).
_PER_CLASS = 8
# Of those, the ones drawn here.
_SHOWN = 3
AXES = (("step", "training steps"), ("macs", "training multiply-adds"), ("hours", "training time"))
Column = tuple[Base, list[tuple[Cell, pd.DataFrame]], Found]


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
    values = {"mean": ("value", "mean"), "std": ("value", "std"), "n": ("value", "size")}
    found = groups.agg(macs=("macs", "mean"), hours=("hours", "mean"), **values)
    return found[found["n"] == len(paths)].reset_index()


def _methods(base: Base) -> list[Cell]:
    """Return the dense cell, the guideline's route and the first cell of every other method."""
    found = [cell for cell in (base.dense, base.auto()) if cell is not None]
    rest: dict[str, Cell] = {}
    for cell in base.routed:
        name, count = str(cell.first("variant")), len(cell.by_seed(base.score))
        if name != "TREAD" and (name not in rest or count > len(rest[name].by_seed(base.score))):
            rest[name] = cell
    return [*found, *rest.values()]


_SEEDS = '"n=3 of 5": the others were scored at their end alone.'


def _seeds(base: Base, cell: Cell, path: pd.DataFrame) -> str:
    """Return the seeds behind a curve, `n=3`, or `n=3 of 5` where tables have more."""
    drawn, known = int(path["n"].max()), len(cell.by_seed(base.score))
    return f"n={drawn}" + (f" of {known}" if known > drawn else "")


@styled
def convergence(study: Study) -> Plot | None:
    """Draw dense against routed for every base that was scored more than once; None without one.

    Dropping, masking and other methods of the same base are drawn too, the most replicated cell of
    each; its further routes, rates and selections are in figures of their own.
    """
    chosen: list[tuple[Base, list[tuple[Cell, pd.DataFrame]]]] = []
    for base in study.bases:
        drawn = [(cell, mean_path(study, base, cell)) for cell in _methods(base)]
        paths = [(cell, path) for cell, path in drawn if len(path) > 1]
        if len(paths) > 1 and paths[0][0] is base.dense:
            chosen.append((base, paths))
    if not chosen:
        return None
    means = [path["mean"] for _, paths in chosen for _, path in paths]
    log = _wide(means)
    figure, axes = canvas(9.4, 2.45 * len(chosen) + 0.1, len(chosen), 3, sharey="row")
    data = []
    for (base, paths), row in zip(chosen, axes, strict=True):
        for ax, (key, label) in zip(row, AXES, strict=True):
            for cell, path in paths:
                _curve(ax, base, cell, path, key)
            ax.set_xlim(left=0)
            _arrow(ax, study, base, paths, key)
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
        f"label is the geometric mean over the seeds that get there. {_SEEDS}",
        figure,
        pd.concat(data, ignore_index=True),
    )


def _curve(
    ax: Axes, base: Base, cell: Cell, path: pd.DataFrame, key: str, name: str | None = None
) -> None:
    """Draw a cell's mean over seeds and, as a band, its standard deviation."""
    # One colour per backbone: further methods are told apart by line and marker.
    shade = "#555555" if cell.treatment == "dense" else colour(str(base.any.first("backbone")))
    label = f"{name or cell.treatment} ({_seeds(base, cell, path)})"
    ax.plot(path[key], path["mean"], color=shade, label=label, **line(cell.treatment))
    spread = path["std"].fillna(0.0)
    low, high = path["mean"] - spread, path["mean"] + spread
    ax.fill_between(path[key], low, high, color=shade, alpha=0.15, linewidth=0)


def _wide(means: Sequence[pd.Series]) -> bool:
    """Say whether scores span so much that a logarithmic axis shows them better."""
    return min(m.min() for m in means) > 0 and max(m.max() / m.min() for m in means) > 3


def _log_scores(ax: Axes) -> None:
    """Make the axis of the scores logarithmic, with plain numbers at its ticks."""
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter(lambda x, _: f"{x:g}" if f"{x:g}"[0] in "235" else "")
    ax.tick_params(axis="y", which="minor", labelsize=7, length=1.5)


def _scales(ax: Axes, key: str, log: bool) -> None:
    if log:
        _log_scores(ax)
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
        text = "dense best not reached"
        place: Options = {"transform": ax.transAxes, "fontsize": 7.5, "color": "#666666"}
        ax.text(0.03, 0.06, text, zorder=6, bbox=_PAPER, **place)
        return
    start = float(np.mean([item.dense[key] for item in there]))
    end = float(np.mean([item.routed[key] for item in there if item.routed]))
    arrow: Options = {"arrowstyle": "-|>", "color": "#1a1a1a", "lw": 1.1}
    arrow |= {"shrinkA": 2, "shrinkB": 2}
    ax.annotate("", xy=(end, best), xytext=(start, best), arrowprops=arrow, zorder=5)
    few = Entry(value=factor.mean, n=factor.n, of=len(reached)).few
    some = f" ({len(there)}/{len(reached)})" if few or len(there) < len(reached) else ""
    above: Options = {"xytext": (0, 4), "textcoords": "offset points", "ha": "center"}
    above |= {"fontsize": 8.5, "fontweight": "normal" if few else "bold", "color": "#1a1a1a"}
    text = f"{factor.mean:.1f}x{some}"
    ax.annotate(text, ((start + end) / 2, best), zorder=6, bbox=_PAPER, **above)


def _dense_and_routed(study: Study, base: Base) -> list[tuple[Cell, pd.DataFrame]]:
    paths = [(cell, mean_path(study, base, cell)) for cell in base.pair() if cell is not None]
    return [(cell, path) for cell, path in paths if len(path) > 1]


def _turned(grid: np.ndarray) -> np.ndarray:
    """Turn a sample grid of one row per class into one column per class, its first pictures."""
    pitch = grid.shape[1] // _PER_CLASS
    rows = grid.shape[0] // pitch
    cut = grid[: rows * pitch, : _SHOWN * pitch].reshape(rows, pitch, _SHOWN, pitch, 3)
    return cut.transpose(2, 1, 0, 3, 4).reshape(_SHOWN * pitch, rows * pitch, 3)


def _name(cell: Cell) -> str:
    return "dense" if cell.treatment == "dense" else f"route {cell.treatment}"


def _points(column: Column) -> int:
    return sum(len(path) * int(path["n"].iloc[0]) for _, path in column[1])


@styled
def overview(study: Study) -> Plot | None:
    """Draw convergence above samples, dense and routed, per backbone; None where either lacks.

    All columns are of one recipe after one number of steps: those that the most backbones share,
    of these the ones with the most seeds and points, then the longest.
    """
    pages: dict[tuple[str, float], dict[str, Column]] = {}
    for base in study.bases:
        curves, found = _dense_and_routed(study, base), chosen(base)
        if len(curves) == len(found) == 2 and {row["step"] for _, row, _ in found} == {
            cell.steps for cell, _ in curves
        }:
            page = pages.setdefault((base.recipe, curves[0][0].steps), {})
            backbone = str(base.any.first("backbone"))
            rival = page.setdefault(backbone, (base, curves, found))
            page[backbone] = max(rival, (base, curves, found), key=_points)
    if not pages:
        return None
    (_, steps), page = max(
        pages.items(), key=lambda p: (len(p[1]), sum(map(_points, p[1].values())), p[0][1])
    )
    columns = list(page.items())
    figure, axes = canvas(
        3.15 * len(columns), 5.0, 3, len(columns), gridspec_kw={"height_ratios": [1.75, 1, 1]}
    )
    data: list[pd.DataFrame] = []
    log = _wide([path["mean"] for _, (_, paths, _) in columns for _, path in paths])
    for place, (backbone, (base, paths, found)) in enumerate(columns):
        top = axes[0][place]
        for cell, path in paths:
            _curve(top, base, cell, path, "macs", _name(cell))
            data.append(path.assign(backbone=backbone, treatment=cell.treatment, of=base.label))
        top.set_title(backbone, color=colour(backbone), fontweight="bold")
        top.set_xlabel("training multiply-adds")
        top.xaxis.set_major_formatter(EngFormatter(sep=""))
        if log:
            _log_scores(top)
        top.legend(loc="upper right")
        for ax, (cell, row, image) in zip(axes[1:, place], found, strict=True):
            ax.imshow(_turned(image), interpolation="nearest")
            quiet(ax)
            ax.set_title(f"{_name(cell)}, step {row['step']}", fontsize=8)
    base = columns[0][1][0]
    axes[0][0].set_ylabel(base.metric.replace(" (", "\n("))
    recipe = base.label.removeprefix(f"{columns[0][0]}-")
    caption = (
        f"{recipe}, {steps:.0f} steps. Top: {base.metric} against training cost, mean and standard "
        f"deviation over seeds; {_SEEDS} Below: samples of one seed from the same noise, one "
        "column per class."
    )
    return Plot(
        "overview",
        "Routed against dense, by architecture",
        caption,
        figure,
        pd.concat(data, ignore_index=True),
    )
