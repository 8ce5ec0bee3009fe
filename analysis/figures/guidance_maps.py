"""Heat maps of guidance with two selection rates (SG, Figs. 4 to 8)."""

from __future__ import annotations

from textwrap import fill
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from analysis.figures.style import Plot, canvas, colormap, colour, ink, styled
from analysis.runs.cells import Base, Cell, Study
from analysis.runs.grouping import short
from analysis.tables.guidance_table import evaluations, number, parse


def _rows(study: Study, base: Base, cell: Cell) -> list[dict[str, Any]]:
    frame = evaluations(study, base, cell)
    rows: list[dict[str, Any]] = []
    if frame.empty:
        return rows
    for text, part in frame.groupby("guidance"):
        kind, options = parse(str(text))
        if kind != "routed" or options.get("null_class") == "True":
            continue
        strong, weak, scale = (number(options.get(key)) for key in ("strong", "weak", "scale"))
        if strong is not None and weak is not None and scale is not None:
            value = float(part.groupby("seed")["value"].mean().mean())
            shared = {
                "panel": base.label,
                "treatment": cell.treatment,
                "backbone": base.any.first("backbone"),
            }
            rates = {"scale": scale, "strong": strong, "weak": weak}
            rows.append(
                {
                    **shared,
                    **rates,
                    "value": value,
                    "n": part["seed"].nunique(),
                    "step": int(part["step"].iloc[0]),
                    "metric": str(part["metric"].iloc[0]),
                    "better": base.better,
                }
            )
    return rows


@styled
def guidance(study: Study) -> Plot | None:
    """Draw a map per trained cell and scale that was scored at four or more pairs of rates.

    None without.
    """
    rows = [row for base in study.bases for cell in base.routed for row in _rows(study, base, cell)]
    frame = pd.DataFrame(rows)
    if frame.empty:
        return None
    panels = [
        (key, part)
        for key, part in frame.groupby(["panel", "treatment", "scale"], sort=False)
        if len(part) >= 4
    ]
    if not panels:
        return None
    columns = min(len(panels), 3)
    lines = -(-len(panels) // columns)
    figure, axes = canvas(3.3 * columns + 0.4, 2.9 * lines, lines, columns)
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    names = short(str(panel) for (panel, *_), _ in panels)
    for ax, ((panel, treatment, scale), part) in zip(axes.flat, panels, strict=False):
        _map(ax, part)
        about = f"{treatment}, w = {scale:g}, step {part['step'].iloc[0]}"
        tint = colour(str(part["backbone"].iloc[0]))
        ax.set_title(f"{fill(names[str(panel)], 48)}\n{about}", color=tint, fontsize=8)
    caption = (
        "Score by the selection rate of the strong pass and of the weak pass, both conditional and "
        "from the same weights, "
        "averaged over seeds; bold marks the best, a cross a pair that was not scored."
    )
    return Plot("guidance", "Guidance with two selection rates", caption, figure, frame)


def _map(ax: Axes, part: pd.DataFrame) -> None:
    grid = part.pivot_table(index="strong", columns="weak", values="value").sort_index(
        ascending=False
    )
    ax.set_facecolor("#f2f2f2")
    cmap = colormap("viridis" if part["better"].iloc[0] == "higher" else "viridis_r")
    image = ax.imshow(grid.to_numpy(), cmap=cmap, aspect="auto", zorder=1)
    known = grid.stack()
    higher = part["better"].iloc[0] == "higher"
    best = known.idxmax() if higher else known.idxmin()
    for y, strong in enumerate(grid.index):
        for x, weak in enumerate(grid.columns):
            value = grid.loc[strong, weak]
            if pd.isna(value):
                ax.text(x, y, "\u00d7", ha="center", va="center", color="#999999")
                continue
            face = cmap(image.norm(value))
            weight = "bold" if (strong, weak) == best else "normal"
            ax.text(
                x,
                y,
                f"{value:.2f}",
                ha="center",
                va="center",
                fontsize=7.5,
                color=ink(face),
                fontweight=weight,
            )
    ax.set_xticks(range(len(grid.columns)), [f"{v:g}" for v in grid.columns])
    ax.set_yticks(range(len(grid.index)), [f"{v:g}" for v in grid.index])
    ax.set(xlabel="rate of the weak pass", ylabel="rate of the strong pass")
    ax.grid(False)
    ax.figure.colorbar(image, ax=ax, label=str(part["metric"].iloc[0]), pad=0.02)
