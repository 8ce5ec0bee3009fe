"""Convergence against steps and multiply-adds, other methods, sample grids, the overview."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, MaxNLocator
from PIL import Image

from analysis.figures import style
from analysis.figures.style import Plot, styled
from analysis.runs.cells import Base, Cell, Study
from analysis.runs.grouping import shared, short
from analysis.runs.seed_statistics import ENOUGH_SEEDS
from analysis.tables.equal_cost import reach, speedup
from analysis.tables.table import metric_decimals, metric_label

AXES = (("step", "training steps"), ("macs", "training multiply-adds"))
# On one page: settings, panels of other methods, recipes of samples.
_LINES, _PANELS, _RECIPES = 5, 12, 3
# A picture beyond this many pixels is not a grid of ours; it must not eat the memory.
_MOST_PIXELS = 64_000_000
# Pictures of one class beside each other in a sample grid (experiments/training/run_evaluation.py).
_PER_CLASS = 8
_SEEDS = '"n=3 of 5": the others were scored at their end alone.'
Curve = tuple[Cell, pd.DataFrame]
Found = list[tuple[Cell, dict[Any, Any], np.ndarray]]  # a cell's run and its sample grid


def mean_path(cell: Cell) -> pd.DataFrame:
    """Return a cell's mean over seeds at every step that all seeds were scored at.

    Seeds that were scored at their end alone say nothing about the way there, and are left out
    where others do.
    """
    known = list(cell.paths.values())
    paths = [path for path in known if len(path) > 1] or known
    if not paths:
        return pd.DataFrame()
    groups = pd.concat(paths, ignore_index=True).groupby("step")
    values = {"mean": ("value", "mean"), "std": ("value", "std"), "n": ("value", "size")}
    found = groups.agg(macs=("macs", "mean"), **values)
    return found[found["n"] == len(paths)].reset_index()


def _seeds(cell: Cell, path: pd.DataFrame) -> str:
    """Return the seeds behind a curve, `n=3`, or `n=3 of 5` where tables have more."""
    drawn, known = int(path["n"].max()), len(cell.by_seed(cell.score))
    return f"n={drawn}" + (f" of {known}" if known > drawn else "")


def _curves(*cells: Cell | None) -> list[Curve]:
    """Return the cells that were scored more than once, with their mean paths."""
    paths = [(cell, mean_path(cell)) for cell in cells if cell is not None]
    return [(cell, path) for cell, path in paths if len(path) > 1]


def paired_curves(base: Base, dense: Cell, routed: Cell) -> list[Curve]:
    """Return both cells with their scores by step, of the same seeds at every point drawn.

    Of the seeds that both share those count that were scored on the way, where they are three or
    all. A cell that was scored once after the same number of steps is a single point.
    """
    known = [_scores_by_seed(base, cell) for cell in (dense, routed)]
    common = [seed for seed in known[0] if seed in known[1]]
    several = [seed for seed in common if any(len(scores[seed]) > 1 for scores in known)]
    seeds = several if len(several) >= min(ENOUGH_SEEDS, len(common)) else common
    curves = []
    for cell, scores in zip((dense, routed), known, strict=True):
        steps = set.intersection(*(set(scores[seed]) for seed in seeds)) if seeds else set()
        rows = []
        for step in sorted(steps):
            points = pd.DataFrame([scores[seed][step] for seed in seeds])
            score = {"mean": points["value"].mean(), "std": points["value"].std()}
            rows.append({"step": step, "macs": points["macs"].mean(), **score, "n": len(seeds)})
        if rows:
            curves.append((cell, pd.DataFrame(rows)))
    return curves


def _scores_by_seed(base: Base, cell: Cell) -> dict[int, dict[float, dict[str, float]]]:
    """Return every seed's `macs` and `value` by step, of all runs of that seed."""
    scores: dict[int, dict[float, dict[str, float]]] = {}
    for seed, run in (
        cell.runs.sort_values("step")[["seed", "run"]].dropna().itertuples(index=False)
    ):
        path = cell.ways.get(run, {}).get(base.metric)
        for row in () if path is None else path.to_dict("records"):
            point = {"macs": row["macs"], "value": row["value"]}
            scores.setdefault(int(seed), {})[float(row["step"])] = point
    return scores


def _cost_known(curves: Sequence[Curve]) -> bool:
    """Return whether all logged their multiply-adds."""
    return all(path["macs"].notna().any() for _, path in curves)


def _points(curves: Sequence[Curve]) -> int:
    return sum(len(path) * int(path["n"].iloc[0]) for _, path in curves)


def _pairs(study: Study) -> list[tuple[Base, list[Curve]]]:
    """Return every base whose dense runs and guideline's route were scored more than once."""
    found = [(base, _curves(base.dense, base.auto())) for base in study.bases]
    return [(base, curves) for base, curves in found if len(curves) == 2]


def _plot(name: str, figure: Any, panels: Sequence[tuple[Base, list[Curve]]], more: str) -> Plot:
    rows = (
        path.assign(panel=base.label, treatment=cell.treatment, metric=base.metric)
        for base, curves in panels
        for cell, path in curves
    )
    said = {"names": shared(base.label for base, _ in panels), "seeds": _SEEDS, "more": more}
    return Plot.of(name, figure, pd.concat(rows, ignore_index=True), **said)


@styled
def convergence(study: Study) -> Plot | None:
    """Draw dense against the guideline's route for every base scored more than once; else None."""
    pairs = _pairs(study)
    if not pairs:
        return None
    shown, more = style.some(pairs, _LINES, lambda pair: _points(pair[1]))
    log = _wide([path["mean"] for _, curves in shown for _, path in curves])
    figure, axes = style.canvas(1.72 * len(shown), len(shown), len(AXES), sharey="row")
    names = short(base.label for base, _ in pairs)
    for (base, curves), row in zip(shown, axes, strict=True):
        for ax, (key, label) in zip(row, AXES, strict=True):
            for cell, path in curves:
                _curve(ax, base, cell, path, path[key])
            _scales(ax, key, log)
            ax.set_xlabel(f"{label}\n{_arrow(ax, base, curves, key)}")
        row[0].set_ylabel(metric_label(base.metric).replace(" (", "\n("))
        row[0].set_title(names[base.label], color=style.colour(base.backbone))
        # Beside the title, above the panels: it would hide curves.
        legend = row[-1].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderpad=0)
        legend.set_in_layout(False)
    return _plot("convergence", figure, pairs, more)


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
        curves = (other for other in _curves(*others) if _cost_known([*rivals, other]))
        found += [(base, rivals, other) for other in curves]
    if not found:
        return None
    shown, more = style.some(found, _PANELS, lambda panel: _points([panel[2]]))
    figure, axes = style.panels(len(shown), 3, 1.75, sharey=True)
    names = short(base.label for base, _, _ in found)
    log = _wide([path["mean"] for _, rivals, other in shown for _, path in [*rivals, other]])
    for place, (ax, (base, rivals, (cell, path))) in enumerate(zip(axes.flat, shown, strict=False)):
        for rival, its in rivals:
            _curve(ax, base, rival, its, its["macs"])
        _curve(ax, base, cell, path, path["macs"], shade="#1a1a1a", marker="D", linestyle="-")
        _scales(ax, "macs", log)
        model = f"{names[base.label]}: " if len(names) > 1 else ""
        steps = f"step {path['step'].iloc[-1]:.0f}, {_seeds(cell, path)}"
        ax.set_title(f"{fill(model + cell.treatment, 32)}\n{steps}", fontsize=7)
        ax.set_xlabel("training multiply-adds")
        if place % 3 == 0:
            ax.set_ylabel(metric_label(base.metric).replace(" (", "\n("))
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles[:2], labels[:2], loc="outside lower center", ncols=2)
    return _plot("methods", figure, [(base, [other]) for base, _, other in found], more)


def _curve(ax: Axes, base: Base, cell: Cell, path: pd.DataFrame, x: pd.Series, **look: Any) -> None:
    """Draw a cell's mean over seeds and, as a band, its standard deviation."""
    usual = style.colour(base.backbone)
    shade = look.pop("shade", style.DENSE_COLOUR if cell.treatment == "dense" else usual)
    label = look.pop("label", cell.treatment) + f" ({_seeds(cell, path)})"
    ax.plot(x, path["mean"], color=shade, label=label, **(style.line(cell.treatment) | look))
    spread = path["std"].fillna(0.0)
    if len(path) == 1:  # a band of no width would not be seen
        ax.errorbar(x, path["mean"], yerr=spread, color=shade, capsize=2, elinewidth=0.8)
    low, high = path["mean"] - spread, path["mean"] + spread
    ax.fill_between(x, low, high, color=shade, alpha=0.15, linewidth=0)


def _wide(means: Sequence[pd.Series]) -> bool:
    """Say whether scores span so much that a logarithmic axis shows them better."""
    return min(m.min() for m in means) > 0 and max(m.max() / m.min() for m in means) > 3


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


def _arrow(ax: Axes, base: Base, curves: list[Curve], key: str) -> str:
    """Draw how much earlier the route is at the dense run's best score; return it in words."""
    (dense, first), (routed, _) = curves
    reached = reach(base, dense, routed)
    factor = speedup(reached, key)
    best = first["mean"].min() if base.better == "lower" else first["mean"].max()
    ax.axhline(best, color="#999999", linewidth=0.7, linestyle=":")
    there = reached[reached["there"].astype(bool)]
    seeds = f"{len(there)} of {len(reached)} seeds"
    if factor.is_missing:
        return "cost not logged"
    if factor.value is None:
        return "dense best not reached"
    if factor.few:
        return f"dense best reached by {seeds}"
    start, end = (float(there[f"{side}_{key}"].mean()) for side in ("dense", "routed"))
    arrow = {"arrowstyle": "-|>", "color": "#1a1a1a", "lw": 1.1, "shrinkA": 2, "shrinkB": 2}
    ax.annotate("", xy=(end, best), xytext=(start, best), arrowprops=arrow, zorder=5)
    return f"{factor.value:.1f}x to dense best ({seeds})"


def picture(run: str | Path) -> np.ndarray | None:
    """Return a run's last sample grid, uint8 (H, W, 3); None if none can be read."""
    try:
        with Image.open(Path(run) / "samples" / "final.png") as image:
            if image.width * image.height > _MOST_PIXELS or image.format != "PNG":
                return None
            pitch = image.width // _PER_CLASS
            return np.asarray(image.convert("RGB")) if 0 < pitch <= image.height else None
    except (OSError, Image.DecompressionBombError, SyntaxError, ValueError):
        return None


def chosen(base: Base) -> Found:
    """Return dense and guideline cells with runs and pictures of one seed and number of steps."""
    cells = [cell for cell in base.pair() if cell is not None]
    known = [
        {(row["step"], row["seed"]): row for row in rows.to_dict("records")}
        for rows in (cell.runs.dropna(subset=["seed", "step"]) for cell in cells)
    ]
    common = set.intersection(*map(set, known)) if known else set()
    usual = cells[-1].steps if cells else None
    for key in sorted(common, key=lambda key: (key[0] != usual, -key[0], key[1])):
        shown = [rows[key] for rows in known]
        images = [picture(str(row["path"])) for row in shown]
        whole = [image for image in images if image is not None]
        if len(whole) == len(cells):
            return list(zip(cells, shown, whole, strict=True))
    return []


def turned(grid: np.ndarray) -> np.ndarray:
    """Turn a grid of one row per class into one column per class, its first pictures."""
    pitch = grid.shape[1] // _PER_CLASS
    rows = grid.shape[0] // pitch
    # About a third as tall as wide.
    shown = min(max(2, round(0.35 * rows)), _PER_CLASS)
    cut = grid[: rows * pitch, : shown * pitch].reshape(rows, pitch, shown, pitch, 3)
    return cut.transpose(2, 1, 0, 3, 4).reshape(shown * pitch, rows * pitch, 3)


def height(grid: np.ndarray, columns: int) -> float:
    """Return the inches that a turned grid needs in a line of `columns` of them."""
    tall, wide, _ = turned(grid).shape
    return (style.SINGLE if columns == 1 else style.DOUBLE / columns - 0.15) * tall / wide


def show(ax: Axes, base: Base, grid: np.ndarray) -> None:
    """Draw a turned grid; the classes stand below where its columns are classes."""
    image = turned(grid)
    ax.imshow(image, interpolation="nearest", aspect="auto")
    style.quiet(ax)
    pitch = grid.shape[1] // _PER_CLASS
    classes = image.shape[1] // pitch
    if str(base.any.first("config.task", "class")) == "class" and classes > 1:
        ax.set_xticks((np.arange(classes) + 0.5) * pitch, [str(i) for i in range(classes)])
        ax.tick_params(length=0, pad=1)


@styled
def samples(study: Study) -> Plot | None:
    """Draw dense above routed, a column per base and its lines of panels per recipe and steps.

    None without a sample grid.
    """
    known = [(base, found) for base in study.bases if (found := chosen(base))]
    # One grid alone compares nothing: it is drawn where there is no better.
    both = [(base, found) for base, found in known if len(found) == 2] or known
    recipes: dict[tuple[str, int], list[tuple[Base, Found]]] = {}
    for base, found in both:
        recipes.setdefault((base.recipe, found[0][1]["step"]), []).append((base, found))
    if not recipes:
        return None
    lines, more = style.some(list(recipes.values()), _RECIPES, len)
    columns = max(map(len, lines))
    tall = height(lines[0][0][1][0][2], columns)
    each = len(both[0][1])  # lines of panels: dense and routed, or the one that there is
    figure, axes = style.canvas((tall + 0.42) * each * len(lines), each * len(lines), columns)
    data: list[dict[str, Any]] = []
    for ax in axes.flat:
        ax.set_visible(False)
    names = short(base.label for base, _ in both)
    for y, recipe in enumerate(lines):
        for x, (base, found) in enumerate(recipe):
            tint = style.colour(base.backbone)
            for cell, row, image in found:
                ax, value = axes[each * y + (cell is not found[0][0])][x], row.get(base.score)
                ax.set_visible(True)
                show(ax, base, image)
                about = f"{cell.treatment}, step {row['step']}, seed {row['seed']}"
                if not pd.isna(value):
                    text = f"{value:.{metric_decimals(base.metric)}f}"
                    about += f", {metric_label(base.metric).partition(' (')[0]} {text}"
                # About 17 characters an inch.
                width = int(17 * figure.get_figwidth() / columns)
                title = f"{fill(names[base.label], width)}\n{fill(about, width)}"
                ax.set_title(title, color=tint, fontsize=7)
                panel = {"panel": base.label, "treatment": cell.treatment, "step": row["step"]}
                run = {"run": row["run"], "seed": row["seed"]}
                data.append({**panel, **run, "score": value, "metric": base.metric})
    return Plot.of("samples", figure, data, names=shared(names), more=more)


@styled
def overview(study: Study) -> Plot | None:
    """Draw scores against cost above samples, dense and routed, per backbone; None without both.

    All columns are of one recipe after one number of steps: those that the most backbones share,
    of these the ones with the most seeds and points, then the longest.
    """
    pages: dict[tuple[str, float], dict[str, tuple[Base, list[Curve], Found]]] = {}
    for base in study.bases:
        dense, routed = base.pair()
        if dense is None or routed is None:
            continue
        curves, found = paired_curves(base, dense, routed), chosen(base)
        both = len(curves) == len(found) == 2 and _cost_known(curves)
        if both and {row["step"] for _, row, _ in found} == {cell.steps for cell, _ in curves}:
            page = pages.setdefault((base.recipe, curves[0][0].steps), {})
            own = base, curves, found
            page[base.backbone] = max(
                page.get(base.backbone, own), own, key=lambda x: _points(x[1])
            )
    if not pages:
        return None
    (_, steps), page = max(
        pages.items(),
        key=lambda p: (len(p[1]), sum(_points(curves) for _, curves, _ in p[1].values()), p[0][1]),
    )
    columns = list(page.items())
    heights = [1.75, *[height(columns[0][1][2][0][2], len(columns))] * 2]
    shape = (sum(heights) + 0.9, 3, len(columns))
    figure, axes = style.canvas(*shape, sharey="row", height_ratios=heights)
    data: list[pd.DataFrame] = []
    log = _wide([path["mean"] for _, (_, curves, _) in columns for _, path in curves])
    for place, (backbone, (base, curves, found)) in enumerate(columns):
        top, tint = axes[0][place], style.colour(backbone)
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
    axes[0][0].set_ylabel(metric_label(base.metric).replace(" (", "\n("))
    names = shared(base.label for _, (base, *_) in columns)
    said = {"names": names, "steps": steps, "metric": metric_label(base.metric), "seeds": _SEEDS}
    return Plot.of("overview", figure, pd.concat(data, ignore_index=True), **said)


def _name(cell: Cell) -> str:
    return "dense" if cell.treatment == "dense" else f"route {cell.treatment}"
