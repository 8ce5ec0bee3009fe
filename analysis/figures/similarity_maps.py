"""Layer similarity (TREAD, Fig. 4): maps on one scale, the routed span outlined."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from analysis.figures.style import Plot, canvas, colour, styled
from analysis.runs.run_records import AnalysisError
from analysis.similarity_file import SimilarityFile, read
from routing.route import Route


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
    columns = min(len(maps), 4)
    lines = -(-len(maps) // columns)
    lowest = min(float(np.nanmin(item.arrays[key])) for item in maps)
    figure, axes = canvas(2.5 * columns + 0.8, 2.85 * lines, lines, columns)
    # Square maps leave room that the usual layout gives away to titles of the next line.
    figure.set_layout_engine("compressed")
    for ax in axes.flat[len(maps) :]:
        ax.set_visible(False)
    image: Any = None
    for ax, item in zip(axes.flat, maps, strict=False):
        image = _map(ax, item, item.arrays[key], lowest)
    bar = figure.colorbar(image, ax=axes, shrink=0.75 if lines == 1 else 0.5, pad=0.015)
    bar.set_label({"cka": "CKA", "centred": "cosine, centred"}.get(key, "cosine similarity"))
    bar.outline.set_visible(False)
    caption = (
        f"{_WHAT.get(key, 'Similarity')} between the outputs of every two blocks "
        '("in": the input of block 0); one colour scale for all maps, '
        f"from {lowest:.2f} to 1; the frame marks the blocks inside the route. "
        f"{maps[0].protocol_line()}"
    )
    return Plot(name, "Layer similarity", caption, figure, _data(maps, key))


_WHAT = {
    "cosine": "Cosine similarity, per token over channels, averaged over all else,",
    "centred": "Cosine similarity after each channel's mean is removed",
    "cka": "Linear CKA (unbiased, per batch of tokens)",
    "routed": "Cosine similarity of the tokens that took the route, in the routed pass,",
    "stayed": "Cosine similarity of the tokens that stayed, in the routed pass,",
}


def _map(ax: Axes, item: SimilarityFile, values: np.ndarray, lowest: float) -> Any:
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


def _data(maps: Sequence[SimilarityFile], key: str) -> pd.DataFrame:
    rows = []
    for item in maps:
        values = item.arrays[key]
        for (i, j), value in np.ndenumerate(values):
            rows.append({"run": item.label, "first": i - 1, "second": j - 1, key: float(value)})
    return pd.DataFrame(rows)
