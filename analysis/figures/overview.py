"""The one picture: convergence and samples, routed against dense, a column per architecture."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.ticker import EngFormatter

from analysis.figures.convergence import SEEDS, log_scores, mean_path, seeds, wide
from analysis.figures.sample_grids import Found, chosen
from analysis.figures.style import Plot, canvas, colour, line, quiet, styled
from analysis.runs.cells import Base, Cell, Study

# Pictures of one class beside each other in a sample grid (experiments/training/evaluation.py).
_PER_CLASS = 8
# Of those, the ones drawn here.
_SHOWN = 3

Column = tuple[Base, list[tuple[Cell, pd.DataFrame]], Found]


def _curves(study: Study, base: Base) -> list[tuple[Cell, pd.DataFrame]]:
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
        curves, found = _curves(study, base), chosen(base)
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
    log = wide([path["mean"] for _, (_, paths, _) in columns for _, path in paths])
    for place, (backbone, (base, paths, found)) in enumerate(columns):
        tint = colour(backbone)
        top = axes[0][place]
        for cell, path in paths:
            shade = "#555555" if cell.treatment == "dense" else tint
            top.plot(
                path["macs"],
                path["mean"],
                color=shade,
                label=f"{_name(cell)} ({seeds(base, cell, path)})",
                **line(cell.treatment),
            )
            spread = path["std"].fillna(0.0)
            low, high = path["mean"] - spread, path["mean"] + spread
            top.fill_between(path["macs"], low, high, color=shade, alpha=0.15, linewidth=0)
            data.append(path.assign(backbone=backbone, treatment=cell.treatment, of=base.label))
        top.set_title(backbone, color=tint, fontweight="bold")
        top.set_xlabel("training multiply-adds")
        top.xaxis.set_major_formatter(EngFormatter(sep=""))
        if log:
            log_scores(top)
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
        f"deviation over seeds; {SEEDS} Below: samples of one seed from the same noise, one column "
        "per class."
    )
    return Plot(
        "overview",
        "Routed against dense, by architecture",
        caption,
        figure,
        pd.concat(data, ignore_index=True),
    )
