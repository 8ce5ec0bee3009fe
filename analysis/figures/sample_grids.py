"""Sample grids side by side: the same noise and labels, dense and routed, per backbone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image, UnidentifiedImageError

from analysis.figures.style import Plot, canvas, colour, quiet, styled
from analysis.runs.comparison_groups import Base, Cell
from analysis.runs.study import Study

# A picture beyond this many pixels is not a grid of ours; it must not eat the memory.
_MOST_PIXELS = 64_000_000


def picture(run: str | Path) -> np.ndarray | None:
    """Return a run's last sample grid, uint8 (H, W, 3); None if none can be read."""
    path = Path(run) / "samples" / "final.png"
    try:
        with Image.open(path) as image:
            if image.width * image.height > _MOST_PIXELS or image.format != "PNG":
                return None
            return np.asarray(image.convert("RGB"))
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError, SyntaxError, ValueError):
        return None


def chosen(base: Base) -> list[tuple[Cell, pd.Series, np.ndarray]]:
    """Return dense and guideline cells with their last runs and pictures at one common seed."""
    cells = [cell for cell in (base.dense, base.auto()) if cell is not None]
    seeds = (
        set.intersection(*(set(cell.runs["seed"].dropna()) for cell in cells)) if cells else set()
    )
    for seed in sorted(seeds):
        found = []
        for cell in cells:
            row = cell.runs[cell.runs["seed"] == seed].sort_values("step").iloc[-1]
            image = picture(str(row["path"]))
            if image is not None:
                found.append((cell, row, image))
        if len(found) == len(cells):
            return found
    return []


@styled
def samples(study: Study) -> Plot | None:
    """Draw one column per base, dense above routed; None without a sample grid."""
    columns = [(base, found) for base in study.bases if (found := chosen(base))]
    if not columns:
        return None
    rows = max(len(found) for _, found in columns)
    ratio = columns[0][1][0][2].shape[0] / columns[0][1][0][2].shape[1]
    width = 2.9
    figure, axes = canvas(width * len(columns), (width * ratio + 0.42) * rows, rows, len(columns))
    data: list[dict[str, Any]] = []
    for ax in axes.flat:
        ax.set_visible(False)
    for x, (base, found) in enumerate(columns):
        for y, (cell, row, image) in enumerate(found):
            ax = axes[y][x]
            ax.set_visible(True)
            ax.imshow(image, interpolation="nearest")
            quiet(ax)
            value = row.get(base.score)
            score = (
                ""
                if value is None or pd.isna(value)
                else f"  {base.metric.split(' ')[0]} {value:.2f}"
            )
            tint = colour(str(base.any.first("backbone")))
            head = base.label.split(",")[0]
            ax.set_title(f"{head}, {cell.treatment}{score}", color=tint, fontsize=8)
            shared = {
                "panel": base.label,
                "treatment": cell.treatment,
                "run": row["run"],
                "seed": row["seed"],
            }
            data.append({**shared, "step": row["step"], "score": value, "metric": base.metric})
    caption = (
        "Samples of each run's averaged weights after training: the same noise and the same labels "
        "at the same place of "
        "every grid, dense above routed, of one training seed."
    )
    return Plot("samples", "Samples, dense and routed", caption, figure, pd.DataFrame(data))
