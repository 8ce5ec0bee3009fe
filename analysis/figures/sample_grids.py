"""Sample grids side by side: the same noise and labels, dense and routed, per backbone."""

from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from PIL import Image, UnidentifiedImageError

from analysis.figures.style import DOUBLE, SINGLE, Plot, canvas, colour, quiet, some, styled
from analysis.runs.cells import Base, Cell, Study
from analysis.runs.grouping import shared, short

Found = list[tuple[Cell, dict[Any, Any], np.ndarray]]
# A picture beyond this many pixels is not a grid of ours; it must not eat the memory.
_MOST_PIXELS = 64_000_000
# Pictures of one class beside each other in a sample grid (experiments/training/evaluation.py).
_PER_CLASS = 8
# Recipes on one page.
_RECIPES = 3


def picture(run: str | Path) -> np.ndarray | None:
    """Return a run's last sample grid, uint8 (H, W, 3); None if none can be read."""
    path = Path(run) / "samples" / "final.png"
    try:
        with Image.open(path) as image:
            if image.width * image.height > _MOST_PIXELS or image.format != "PNG":
                return None
            pitch = image.width // _PER_CLASS
            return np.asarray(image.convert("RGB")) if 0 < pitch <= image.height else None
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError, SyntaxError, ValueError):
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
    return (SINGLE if columns == 1 else DOUBLE / columns - 0.15) * tall / wide


def show(ax: Axes, base: Base, grid: np.ndarray) -> None:
    """Draw a turned grid; the classes stand below where its columns are classes."""
    image = turned(grid)
    ax.imshow(image, interpolation="nearest", aspect="auto")
    quiet(ax)
    pitch = grid.shape[1] // _PER_CLASS
    classes = image.shape[1] // pitch
    if str(base.any.first("config.task", "class")) == "class" and classes > 1:
        places = (np.arange(classes) + 0.5) * pitch
        ax.set_xticks(places, [str(i) for i in range(classes)])
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
    lines, more = some(list(recipes.values()), _RECIPES, len)
    columns = max(map(len, lines))
    tall = height(lines[0][0][1][0][2], columns)
    each = len(both[0][1])  # lines of panels: dense and routed, or the one that there is
    figure, axes = canvas((tall + 0.42) * each * len(lines), each * len(lines), columns)
    data: list[dict[str, Any]] = []
    for ax in axes.flat:
        ax.set_visible(False)
    names = short(base.label for base, _ in both)
    for y, line in enumerate(lines):
        for x, (base, found) in enumerate(line):
            tint = colour(str(base.any.first("backbone")))
            for cell, row, image in found:
                ax = axes[each * y + (cell is not found[0][0])][x]
                ax.set_visible(True)
                show(ax, base, image)
                value = row.get(base.score)
                about = f"{cell.treatment}, step {row['step']}, seed {row['seed']}"
                if value is not None and not pd.isna(value):
                    about += f", {base.metric.split(' ')[0]} {value:.2f}"
                # About 17 characters an inch.
                width = int(17 * figure.get_figwidth() / columns)
                title = f"{fill(names[base.label], width)}\n{fill(about, width)}"
                ax.set_title(title, color=tint, fontsize=7)
                panel = {"panel": base.label, "treatment": cell.treatment, "step": row["step"]}
                run = {"run": row["run"], "seed": row["seed"]}
                data.append({**panel, **run, "score": value, "metric": base.metric})
    return Plot.of("samples", figure, data, names=shared(names), more=more)
