"""Sample grids side by side: the same noise and labels, dense and routed, per backbone."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image, UnidentifiedImageError

from analysis.figures.style import Plot, canvas, colour, quiet, styled
from analysis.runs.cells import Base, Cell, Study

Found = list[tuple[Cell, dict[Any, Any], np.ndarray]]
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
        found = []
        for cell, rows in zip(cells, known, strict=True):
            row = rows[key]
            image = picture(str(row["path"]))
            if image is not None:
                found.append((cell, row, image))
        if len(found) == len(cells):
            return found
    return []


@styled
def samples(study: Study) -> Plot | None:
    """Draw dense above routed, a column per base and two lines of panels per recipe and steps.

    None without a sample grid.
    """
    known = [(base, found) for base in study.bases if (found := chosen(base))]
    # One grid alone compares nothing: it is drawn where there is no better.
    both = [(base, found) for base, found in known if len(found) == 2] or known
    lines: dict[tuple[str, int], list[tuple[Base, Found]]] = {}
    for base, found in both:
        lines.setdefault((base.recipe, found[0][1]["step"]), []).append((base, found))
    if not lines:
        return None
    columns = max(map(len, lines.values()))
    first = next(iter(lines.values()))[0][1][0][2]
    width, ratio = 2.9, first.shape[0] / first.shape[1]
    figure, axes = canvas(
        width * columns, (width * ratio + 0.7) * 2 * len(lines), 2 * len(lines), columns
    )
    data: list[dict[str, Any]] = []
    for ax in axes.flat:
        ax.set_visible(False)
    for y, ((_, steps), panels) in enumerate(lines.items()):
        for x, (base, found) in enumerate(panels):
            for cell, row, image in found:
                ax = axes[2 * y + (cell is not found[0][0] or base.dense is None)][x]
                ax.set_visible(True)
                ax.imshow(image, interpolation="nearest")
                quiet(ax)
                value = row.get(base.score)
                about = f"{cell.treatment}, step {steps}"
                if value is not None and not pd.isna(value):
                    about += f", {base.metric.split(' ')[0]} {value:.2f}"
                tint = colour(str(base.any.first("backbone")))
                ax.set_title(f"{fill(base.label, 48)}\n{about}", color=tint, fontsize=7)
                panel = {"panel": base.label, "treatment": cell.treatment, "step": steps}
                run = {"run": row["run"], "seed": row["seed"]}
                data.append({**panel, **run, "score": value, "metric": base.metric})
    caption = (
        "Samples of each run's averaged weights after training: the same noise and the same labels "
        "at the same place of every grid, dense above routed, of one training seed. Panels of one "
        "line share recipe and steps."
    )
    return Plot("samples", "Samples, dense and routed", caption, figure, pd.DataFrame(data))
