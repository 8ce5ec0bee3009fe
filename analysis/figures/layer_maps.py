"""Inside a model: similarity of its layers (TREAD, Fig. 4)."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from analysis.comparison.results import Results
from analysis.errors import AnalysisError
from analysis.figures import style
from analysis.figures.style import Options, Plot, styled
from analysis.measurements.measured import read_beside
from analysis.measurements.similarity_file import SimilarityFile, read
from routing.route import Route

_MOST_COLUMNS = 4  # of maps, where each model has one; else three
_CROWDED = 3  # columns beyond which every other block is labelled


@styled
def similarity(files: Sequence[str | Path | SimilarityFile]) -> Plot:
    """Draw similarity maps of `.npz` files of `analysis.similarity`, or of read ones, side by side.

    `AnalysisError` if there is no file.
    """
    maps = [item if isinstance(item, SimilarityFile) else read(item) for item in files]
    if not maps:
        raise AnalysisError("no similarity file; make one with python -m analysis similarity RUN")
    maps, columns = _arrange(_with_data_names(maps))
    lowest = min(float(np.nanmin(item.cosine)) for item in maps)
    side = (style.DOUBLE - 0.6) / columns if columns > 1 else style.SINGLE - 0.6
    figure, axes = style.panels(len(maps), columns, side + 0.35)
    # The usual layout would leave gaps between square maps.
    figure.set_layout_engine("compressed")
    image: Any = None
    for index, (ax, item) in enumerate(zip(axes.flat, maps, strict=False)):
        image = _draw_map(ax, item, lowest, crowded=columns > _CROWDED)
        if index % columns == 0:
            ax.set_ylabel("block")
    bar = figure.colorbar(image, ax=axes, shrink=0.75 if len(axes) == 1 else 0.5, pad=0.015)
    bar.set_label("cosine similarity")
    bar.outline.set_visible(False)
    return Plot.of(
        "similarity",
        figure,
        _values(maps),
        lowest=lowest,
        protocol=" ".join(dict.fromkeys(item.protocol_line() for item in maps)),
    )


def _with_data_names(maps: list[SimilarityFile]) -> list[SimilarityFile]:
    """Return maps whose labels name their data, where they are of several data sets."""
    if len({item.protocol.get("data") for item in maps}) == 1:
        return maps
    named = []
    for item in maps:
        size = f"{item.protocol['size']}, {item.protocol['data']}"
        named.append(dataclasses.replace(item, protocol={**item.protocol, "size": size}))
    return named


def _arrange(maps: list[SimilarityFile]) -> tuple[list[SimilarityFile], int]:
    """Return the maps in the order of their panels, and the number of columns.

    Where every model has the same routes each route has a line: maps are read down and across.
    """
    keys = list(map(_model_and_route, maps))
    models, routes = len({model for model, _ in keys}), len({route for _, route in keys})
    is_complete = models * routes == len(maps) == len(set(keys))
    if models <= _MOST_COLUMNS and is_complete:
        return sorted(maps, key=lambda item: _model_and_route(item)[::-1]), models
    return maps, min(3, len(maps))


def _model_and_route(item: SimilarityFile) -> tuple[str, str]:
    """Return column and line of a map; dense (the empty route) sorts first."""
    return item.model, item.route.replace("none", "")


def _values(maps: list[SimilarityFile]) -> pd.DataFrame:
    """Return a row per map and pair of blocks; -1 is the input."""
    rows = []
    for item in maps:
        for (i, j), value in np.ndenumerate(item.cosine):
            row = {"run": item.label, "first": i - 1, "second": j - 1}
            rows.append({**row, "cosine": float(value)})
    return pd.DataFrame(rows)


def _draw_map(ax: Axes, item: SimilarityFile, lowest: float, crowded: bool) -> Any:
    values = item.cosine
    image = ax.imshow(values, vmin=lowest, vmax=1.0, cmap="magma", origin="upper")
    labels = ["in", *map(str, range(len(values) - 1))]
    stride = 4
    if len(labels) <= 14:
        stride = 2 if crowded else 1
    ticks = [0, *range(1, len(labels), stride)]
    style.quiet(ax)
    ax.set_xticks(ticks, [labels[i] for i in ticks])
    ax.set_yticks(ticks, [labels[i] for i in ticks])
    ax.tick_params(length=0)
    look: Options = {"fill": False, "edgecolor": "#56B4E9", "linewidth": 1.8}
    for segment in Route.parse(item.route).segments:
        # Row and column 0 are the input: block i is at i + 1.
        corner, size = segment.start + 0.5, segment.end - segment.start + 1
        ax.add_patch(Rectangle((corner, corner), size, size, **look))
    ax.set_title(item.label, color=style.colour(str(item.protocol["backbone"])))
    step, seed = item.protocol.get("step", "?"), item.protocol.get("seed_of_run", "?")
    ax.set_xlabel(f"block (step {step}, seed {seed})")
    return image


def similarity_maps(results: Results) -> Plot | None:
    """Draw the files `similarity.npz` of the run folders; None without one."""
    first: dict[tuple[str, str], SimilarityFile] = {}
    for item in read_beside(results.runs["path"], "similarity.npz", read):
        # One map per data set, architecture and route: seeds look alike.
        first.setdefault((item.protocol["data"], item.label), item)
    return similarity([first[key] for key in sorted(first)]) if first else None
