"""Convergence against steps, multiply-adds and hours, other methods, the overview with samples."""

from collections.abc import Iterable, Sequence
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, MaxNLocator

from analysis.figures.sample_grids import Found, chosen, height, show
from analysis.figures.style import (
    DENSE_COLOUR,
    Options,
    Plot,
    canvas,
    colour,
    line,
    panels,
    some,
    styled,
)
from analysis.runs.cells import Base, Cell, Study, same_machine
from analysis.runs.grouping import shared, short
from analysis.tables.equal_cost import reach, speedup

AXES = (("step", "training steps"), ("macs", "training multiply-adds"), ("hours", "training time"))
# Settings, and panels of other methods, on one page.
_LINES, _PANELS = 5, 12
Curve = tuple[Cell, pd.DataFrame]
Column = tuple[Base, list[Curve], Found]


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


_SEEDS = '"n=3 of 5": the others were scored at their end alone.'


def _seeds(base: Base, cell: Cell, path: pd.DataFrame) -> str:
    """Return the seeds behind a curve, `n=3`, or `n=3 of 5` where tables have more."""
    drawn, known = int(path["n"].max()), len(cell.by_seed(base.score))
    return f"n={drawn}" + (f" of {known}" if known > drawn else "")


def _curves(study: Study, base: Base, *cells: Cell | None) -> list[Curve]:
    """Return the cells that were scored more than once, with their mean paths."""
    paths = [(cell, mean_path(study, base, cell)) for cell in cells if cell is not None]
    return [(cell, path) for cell, path in paths if len(path) > 1]


def _points(curves: Sequence[Curve]) -> int:
    return sum(len(path) * int(path["n"].iloc[0]) for _, path in curves)


def _pairs(study: Study) -> list[tuple[Base, list[Curve]]]:
    """Return every base whose dense runs and guideline's route were scored more than once."""
    found = [(base, _curves(study, base, base.dense, base.auto())) for base in study.bases]
    return [(base, curves) for base, curves in found if len(curves) == 2]


def _data(panels: Iterable[tuple[Base, list[Curve]]]) -> pd.DataFrame:
    rows = (
        path.assign(panel=base.label, treatment=cell.treatment, metric=base.metric)
        for base, curves in panels
        for cell, path in curves
    )
    return pd.concat(rows, ignore_index=True)


@styled
def convergence(study: Study) -> Plot | None:
    """Draw dense against the guideline's route for every base scored more than once; else None."""
    pairs = _pairs(study)
    if not pairs:
        return None
    shown, more = some(pairs, _LINES, lambda pair: _points(pair[1]))
    log = _wide([path["mean"] for _, curves in shown for _, path in curves])
    figure, axes = canvas(1.72 * len(shown), len(shown), 3, sharey="row")
    names = short(base.label for base, _ in pairs)
    for (base, curves), row in zip(shown, axes, strict=True):
        for ax, (key, label) in zip(row, AXES, strict=True):
            unit, factor = _unit(key, curves)
            for cell, path in curves:
                _curve(ax, base, cell, path, path[key] * factor)
            _scales(ax, key, log)
            ax.set_xlabel(f"{label}{unit}\n{_arrow(ax, study, base, curves, key, factor)}")
        row[0].set_ylabel(base.metric.replace(" (", "\n("))
        row[0].set_title(names[base.label], color=colour(str(base.any.first("backbone"))))
        # Beside the title, above the panels: it would hide curves.
        legend = row[-1].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderpad=0)
        legend.set_in_layout(False)
    data = _data(pairs)
    return Plot.of("convergence", figure, data, names=shared(names), seeds=_SEEDS, more=more)


@styled
def methods(study: Study) -> Plot | None:
    """Draw dropping, masking and other methods, a panel each, against dense and TREAD; else None.

    Of each method the most replicated cell is drawn; further routes, rates and selections are in
    figures of their own.
    """
    found = []
    for base, rivals in _pairs(study):
        ranked = sorted(base.routed, key=lambda cell: -len(cell.by_seed(base.score)))
        best = {str(cell.first("variant")): cell for cell in reversed(ranked)}
        others = (best[name] for name in sorted(best) if name != "TREAD")
        found += [(base, rivals, other) for other in _curves(study, base, *others)]
    if not found:
        return None
    shown, more = some(found, _PANELS, lambda panel: _points([panel[2]]))
    figure, axes = panels(len(shown), 3, 1.75, sharey=True)
    names = short(base.label for base, _, _ in found)
    log = _wide([path["mean"] for _, rivals, other in shown for _, path in [*rivals, other]])
    for place, (ax, (base, rivals, (cell, path))) in enumerate(zip(axes.flat, shown, strict=False)):
        for rival, its in rivals:
            _curve(ax, base, rival, its, its["macs"])
        _curve(ax, base, cell, path, path["macs"], shade="#1a1a1a", marker="D", linestyle="-")
        _scales(ax, "macs", log)
        model = f"{names[base.label]}: " if len(names) > 1 else ""
        steps = f"step {path['step'].iloc[-1]:.0f}, {_seeds(base, cell, path)}"
        ax.set_title(f"{fill(model + cell.treatment, 32)}\n{steps}", fontsize=7)
        ax.set_xlabel("training multiply-adds")
        if place % 3 == 0:
            ax.set_ylabel(base.metric.replace(" (", "\n("))
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles[:2], labels[:2], loc="outside lower center", ncols=2)
    data = _data((base, [other]) for base, _, other in found)
    return Plot.of("methods", figure, data, names=shared(names), seeds=_SEEDS, more=more)


def _curve(
    ax: Axes, base: Base, cell: Cell, path: pd.DataFrame, x: pd.Series, **style: Any
) -> None:
    """Draw a cell's mean over seeds and, as a band, its standard deviation."""
    usual = colour(str(base.any.first("backbone")))
    shade = style.pop("shade", DENSE_COLOUR if cell.treatment == "dense" else usual)
    label = style.pop("label", cell.treatment) + f" ({_seeds(base, cell, path)})"
    ax.plot(x, path["mean"], color=shade, label=label, **(line(cell.treatment) | style))
    spread = path["std"].fillna(0.0)
    low, high = path["mean"] - spread, path["mean"] + spread
    ax.fill_between(x, low, high, color=shade, alpha=0.15, linewidth=0)


def _wide(means: Sequence[pd.Series]) -> bool:
    """Say whether scores span so much that a logarithmic axis shows them better."""
    return min(m.min() for m in means) > 0 and max(m.max() / m.min() for m in means) > 3


def _unit(key: str, curves: Sequence[Curve]) -> tuple[str, float]:
    """Return what an axis' label says of its unit, and the numbers' factor from hours."""
    if key != "hours":
        return "", 1.0
    hours = max(float(path[key].iloc[-1]) for _, path in curves)
    return (" (h)", 1.0) if hours > 2 else (" (min)", 60.0) if hours > 0.04 else (" (s)", 3600.0)


def _scales(ax: Axes, key: str, log: bool) -> None:
    """Give an axis few round ticks from 0 on, and scores plain numbers on a logarithmic one."""
    ax.set_xlim(left=0)
    ax.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    if key == "macs":
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    if log:
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter(lambda x, _: f"{x:g}" if f"{x:g}"[0] in "235" else "")
        ax.tick_params(axis="y", which="minor", labelsize=7, length=1.5)


def _arrow(
    ax: Axes, study: Study, base: Base, curves: Sequence[Curve], key: str, unit: float
) -> str:
    """Draw how much earlier the route is at the dense run's best score; return it in words."""
    (dense, first), (routed, _) = curves
    reached = reach(study, base, dense, routed)
    factor = speedup(reached, key)
    if key == "hours" and not same_machine(dense, routed):
        # Two machines: the clock says nothing about the route.
        return "two machines: not compared"
    best = first["mean"].min() if base.better == "lower" else first["mean"].max()
    ax.axhline(best, color="#999999", linewidth=0.7, linestyle=":")
    there = [item for item in reached if item.routed is not None]
    if factor.value is None:
        return "dense best not reached"
    if factor.few:
        return f"dense best reached by {len(there)} of {len(reached)} seeds"
    start = unit * float(np.mean([item.dense[key] for item in there]))
    end = unit * float(np.mean([item.routed[key] for item in there if item.routed]))
    arrow: Options = {"arrowstyle": "-|>", "color": "#1a1a1a", "lw": 1.1}
    arrow |= {"shrinkA": 2, "shrinkB": 2}
    ax.annotate("", xy=(end, best), xytext=(start, best), arrowprops=arrow, zorder=5)
    return f"{factor.value:.1f}x to dense best ({len(there)} of {len(reached)} seeds)"


@styled
def overview(study: Study) -> Plot | None:
    """Draw convergence above samples, dense and routed, per backbone; None where either lacks.

    All columns are of one recipe after one number of steps: those that the most backbones share,
    of these the ones with the most seeds and points, then the longest.
    """
    pages: dict[tuple[str, float], dict[str, Column]] = {}
    for base in study.bases:
        curves, found = _curves(study, base, *base.pair()), chosen(base)
        if len(curves) == len(found) == 2 and {row["step"] for _, row, _ in found} == {
            cell.steps for cell, _ in curves
        }:
            page = pages.setdefault((base.recipe, curves[0][0].steps), {})
            backbone = str(base.any.first("backbone"))
            rival = page.setdefault(backbone, (base, curves, found))
            page[backbone] = max(
                rival, (base, curves, found), key=lambda column: _points(column[1])
            )
    if not pages:
        return None
    (_, steps), page = max(
        pages.items(),
        key=lambda p: (len(p[1]), sum(_points(curves) for _, curves, _ in p[1].values()), p[0][1]),
    )
    columns = list(page.items())
    heights = [1.75, *[height(columns[0][1][2][0][2], len(columns))] * 2]
    figure, axes = canvas(
        sum(heights) + 0.9, 3, len(columns), sharey="row", gridspec_kw={"height_ratios": heights}
    )
    data: list[pd.DataFrame] = []
    log = _wide([path["mean"] for _, (_, curves, _) in columns for _, path in curves])
    for place, (backbone, (base, curves, found)) in enumerate(columns):
        top, tint = axes[0][place], colour(backbone)
        for cell, path in curves:
            _curve(top, base, cell, path, path["macs"], label=_name(cell))
            data.append(path.assign(backbone=backbone, treatment=cell.treatment, of=base.label))
        top.set_title(base.model, color=tint)
        top.set_xlabel("training multiply-adds")
        _scales(top, "macs", log)
        top.legend(loc="best")
        for ax, (cell, row, image) in zip(axes[1:, place], found, strict=True):
            show(ax, base, image)
            about = f"{_name(cell)}, step {row['step']}, seed {row['seed']}"
            ax.set_title(about, color=tint, fontsize=7.5, fontweight="normal")
    axes[0][0].set_ylabel(base.metric.replace(" (", "\n("))
    names = shared(base.label for _, (base, *_) in columns)
    said = {"names": names, "steps": steps, "metric": base.metric, "seeds": _SEEDS}
    return Plot.of("overview", figure, pd.concat(data, ignore_index=True), **said)


def _name(cell: Cell) -> str:
    return "dense" if cell.treatment == "dense" else f"route {cell.treatment}"
