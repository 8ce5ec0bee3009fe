"""The one picture: convergence and samples, routed against dense, a column per architecture."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import EngFormatter

from analysis.figures.convergence import log_scores, mean_path, wide
from analysis.figures.sample_grids import chosen
from analysis.figures.style import Plot, canvas, colour, line, quiet, styled
from analysis.runs.comparison_groups import Base, Cell
from analysis.runs.study import Study

# Pictures of one class beside each other in a sample grid (experiments/training/evaluation.py).
_PER_CLASS = 8
# Of those, the ones drawn here.
_SHOWN = 3


def _curves(study: Study, base: Base) -> list[tuple[Cell, pd.DataFrame]]:
    cells = [cell for cell in (base.dense, base.auto()) if cell is not None]
    paths = [(cell, mean_path(study, base, cell)) for cell in cells]
    return [(cell, path) for cell, path in paths if len(path) > 1]


def _turned(grid: np.ndarray) -> np.ndarray:
    """Turn a sample grid of one row per class into one column per class, its first pictures."""
    pitch = grid.shape[1] // _PER_CLASS
    rows = grid.shape[0] // pitch
    cut = grid[: rows * pitch, : _SHOWN * pitch].reshape(rows, pitch, _SHOWN, pitch, 3)
    return cut.transpose(2, 1, 0, 3, 4).reshape(_SHOWN * pitch, rows * pitch, 3)


def _name(cell: Cell) -> str:
    return "dense" if cell.treatment == "dense" else f"route {cell.treatment}"


@styled
def overview(study: Study) -> Plot | None:
    """Draw convergence above samples, dense and routed, per backbone; None where either lacks.

    Of several settings of a backbone the curve is that of the most seeds and points, the samples
    are those of the longest training.
    """
    columns = []
    for backbone in dict.fromkeys(str(base.any.first("backbone")) for base in study.bases):
        own = [base for base in study.bases if str(base.any.first("backbone")) == backbone]
        curves = [(base, paths) for base in own if len(paths := _curves(study, base)) == 2]
        pictures = [(base, found) for base in own if len(found := chosen(base)) == 2]
        if curves and pictures:
            curve = max(curves, key=lambda c: sum(len(p) * p["n"].iloc[0] for _, p in c[1]))
            columns.append((backbone, curve, max(pictures, key=lambda p: p[1][0][1]["step"])))
    if not columns:
        return None
    figure, axes = canvas(
        3.15 * len(columns), 5.0, 3, len(columns), gridspec_kw={"height_ratios": [1.75, 1, 1]}
    )
    data: list[pd.DataFrame] = []
    log = wide([path["mean"] for _, (_, paths), _ in columns for _, path in paths])
    for place, (backbone, (base, paths), (_, found)) in enumerate(columns):
        tint = colour(backbone)
        top = axes[0][place]
        for cell, path in paths:
            shade = "#555555" if cell.treatment == "dense" else tint
            top.plot(
                path["macs"],
                path["mean"],
                color=shade,
                label=f"{_name(cell)} (n={path['n'].max():.0f})",
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
    _label(axes[0][0], columns)
    caption = (
        "Top: Frechet distance against training cost, mean and standard deviation over seeds. "
        "Below: samples of one seed from the same noise, one column per class."
    )
    return Plot(
        "overview",
        "Routed against dense, by architecture",
        caption,
        figure,
        pd.concat(data, ignore_index=True),
    )


def _label(ax: Any, columns: list[Any]) -> None:
    base: Base = columns[0][1][0]
    ax.set_ylabel(base.metric.replace(" (", "\n("))
