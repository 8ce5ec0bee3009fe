"""Heat maps: guidance with two rates (SG, Figs. 4 to 8), layer similarity (TREAD, Fig. 4)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from analysis.figures.style import Plot, centred, colormap, colour, ink, panels, styled
from analysis.runs.cells import Base, Cell, Study
from analysis.runs.grouping import short
from analysis.runs.run_records import AnalysisError
from analysis.similarity import SimilarityFile, read
from analysis.tables.guidance_table import evaluations, number, parse
from routing.route import Route


def _guidance_rows(study: Study, base: Base, cell: Cell) -> list[dict[str, Any]]:
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
            about = {"panel": base.label, "treatment": cell.treatment}
            about["backbone"] = base.any.first("backbone")
            rates = {"scale": scale, "strong": strong, "weak": weak, "value": value}
            first = {"n": part["seed"].nunique(), "step": int(part["step"].iloc[0])}
            measure = {"metric": str(part["metric"].iloc[0]), "better": base.better}
            rows.append({**about, **rates, **first, **measure})
    return rows


@styled
def guidance(study: Study) -> Plot | None:
    """Draw a map per cell and scale that was scored at four or more pairs of rates; else None."""
    cells = [(base, cell) for base in study.bases for cell in base.routed]
    frame = pd.DataFrame([row for pair in cells for row in _guidance_rows(study, *pair)])
    if frame.empty:
        return None
    found = [
        (key, part)
        for key, part in frame.groupby(["panel", "treatment", "scale"], sort=False)
        if len(part) >= 4
    ]
    if not found:
        return None
    figure, axes = panels(len(found), 3, 3.3, 2.9, beside=0.4)
    names = short(str(panel) for (panel, *_), _ in found)
    for ax, ((panel, treatment, scale), part) in zip(axes.flat, found, strict=False):
        _guidance_map(ax, part)
        about = f"{treatment}, w = {scale:g}, step {part['step'].iloc[0]}"
        tint = colour(str(part["backbone"].iloc[0]))
        ax.set_title(f"{fill(names[str(panel)], 48)}\n{about}", color=tint, fontsize=8)
    caption = (
        "Score by the selection rate of the strong pass and of the weak pass, both conditional and "
        "from the same weights, averaged over seeds; bold marks the best, a cross a pair that was "
        "not scored."
    )
    return Plot("guidance", "Guidance with two selection rates", caption, figure, frame)


def _guidance_map(ax: Axes, part: pd.DataFrame) -> None:
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
                centred(ax, x, y, "\u00d7", color="#999999")
                continue
            weight = "bold" if (strong, weak) == best else "normal"
            shade = ink(cmap(image.norm(value)))
            centred(ax, x, y, f"{value:.2f}", fontsize=7.5, color=shade, fontweight=weight)
    ax.set_xticks(range(len(grid.columns)), [f"{v:g}" for v in grid.columns])
    ax.set_yticks(range(len(grid.index)), [f"{v:g}" for v in grid.index])
    ax.set(xlabel="rate of the weak pass", ylabel="rate of the strong pass")
    ax.grid(False)
    ax.figure.colorbar(image, ax=ax, label=str(part["metric"].iloc[0]), pad=0.02)


_WHAT = {
    "cosine": "Cosine similarity, per token over channels, averaged over all else,",
    "centred": "Cosine similarity after each channel's mean is removed",
    "cka": "Linear CKA (unbiased, per batch of tokens)",
    "routed": "Cosine similarity of the tokens that took the route, in the routed pass,",
    "stayed": "Cosine similarity of the tokens that stayed, in the routed pass,",
}


@styled
def similarity(
    files: Sequence[str | Path | SimilarityFile], name: str = "similarity", key: str = "cosine"
) -> Plot:
    """Draw similarity maps side by side.

    Args:
        files: What `analysis.similarity` wrote (`.npz`), or read files.
        name: File name of the figure.
        key: Which array: `cosine`, `centred`, `cka`, `routed`, `stayed`.

    Raises:
        AnalysisError: if there is no file, or one lacks the array.
    """
    maps = [item if isinstance(item, SimilarityFile) else read(item) for item in files]
    if not maps:
        raise AnalysisError(
            "no similarity file was given; make one with python -m analysis similarity RUN"
        )
    for item in maps:
        if key not in item.arrays:
            raise AnalysisError(
                f"{item.label} has no array {key!r}; it has {', '.join(sorted(item.arrays))}"
            )
    lowest = min(float(np.nanmin(item.arrays[key])) for item in maps)
    figure, axes = panels(len(maps), 4, 2.5, 2.85, beside=0.8)
    # Square maps leave room that the usual layout gives away to titles of the next line.
    figure.set_layout_engine("compressed")
    image: Any = None
    for ax, item in zip(axes.flat, maps, strict=False):
        image = _similarity_map(ax, item, item.arrays[key], lowest)
    bar = figure.colorbar(image, ax=axes, shrink=0.75 if len(axes) == 1 else 0.5, pad=0.015)
    bar.set_label({"cka": "CKA", "centred": "cosine, centred"}.get(key, "cosine similarity"))
    bar.outline.set_visible(False)
    caption = (
        f"{_WHAT.get(key, 'Similarity')} between the outputs of every two blocks "
        '("in": the input of block 0); one colour scale for all maps, '
        f"from {lowest:.2f} to 1; the frame marks the blocks inside the route. "
        f"{maps[0].protocol_line()}"
    )
    return Plot(name, "Layer similarity", caption, figure, _similarity_data(maps, key))


def _similarity_map(ax: Axes, item: SimilarityFile, values: np.ndarray, lowest: float) -> Any:
    image = ax.imshow(values, vmin=lowest, vmax=1.0, cmap="magma", origin="upper")
    labels = ["in", *(str(i) for i in range(len(values) - 1))]
    every = 1 if len(labels) <= 14 else 4
    places = [0, *range(1, len(labels), every)]
    ax.set_xticks(places, [labels[i] for i in places], fontsize=6.5)
    ax.set_yticks(places, [labels[i] for i in places], fontsize=6.5)
    ax.grid(False)
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.tick_params(length=0)
    for segment in Route.parse(item.route).segments:
        # Row and column 0 are the input: block i stands at i + 1.
        corner, size = segment.start + 0.5, segment.end - segment.start + 1
        ax.add_patch(
            Rectangle((corner, corner), size, size, fill=False, edgecolor="#56B4E9", linewidth=1.8)
        )
    ax.set_title(f"{item.label}", color=colour(item.backbone), fontsize=8.5)
    ax.set_xlabel("block")
    return image


def _similarity_data(maps: Sequence[SimilarityFile], key: str) -> pd.DataFrame:
    rows = []
    for item in maps:
        values = item.arrays[key]
        for (i, j), value in np.ndenumerate(values):
            rows.append({"run": item.label, "first": i - 1, "second": j - 1, key: float(value)})
    return pd.DataFrame(rows)


def similarity_maps(study: Study) -> Plot | None:
    """Draw the files `similarity.npz` of the study's run folders; None without one."""
    paths = [Path(str(path)) / "similarity.npz" for path in study.runs.get("path", [])]
    maps = []
    for path in paths:
        if path.is_file():
            try:
                maps.append(read(path))
            except AnalysisError as error:
                # One broken file must not take the other figures with it.
                warnings.warn(str(error), stacklevel=2)
    # One map per architecture and route says it; further seeds say it again.
    first = {item.label: item for item in reversed(maps)}
    return similarity([first[label] for label in sorted(first)]) if first else None
