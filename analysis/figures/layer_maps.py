"""Layer similarity of trained models, as maps side by side (TREAD, Fig. 4)."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from analysis.figures.style import DOUBLE, SINGLE, Plot, colour, panels, styled
from analysis.runs.cells import Study
from analysis.runs.run_records import AnalysisError
from analysis.runs.weights import read_beside
from analysis.similarity import SimilarityFile, read
from routing.route import Route

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
    """Draw similarity maps of `.npz` files of `analysis.similarity`, or of read ones, side by side.

    Args:
        files: At least one.
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
    # One line per route where every model has the same ones: read down and across.
    models, routes = (len(set(names)) for names in zip(*map(_place, maps), strict=True))
    whole = models <= 4 and models * routes == len(maps) == len({_place(item) for item in maps})
    maps = sorted(maps, key=lambda item: _place(item)[::-1]) if whole else maps
    columns = min(models if whole else 3, len(maps))
    side = (DOUBLE - 0.6) / columns if columns > 1 else SINGLE - 0.6
    figure, axes = panels(len(maps), columns, side + 0.35)
    # Square maps leave room that the usual layout gives away to titles of the next line.
    figure.set_layout_engine("compressed")
    image: Any = None
    for place, (ax, item) in enumerate(zip(axes.flat, maps, strict=False)):
        image = _similarity_map(ax, item, item.arrays[key], lowest, crowded=columns > 3)
        if place % columns == 0:
            ax.set_ylabel("block")
    bar = figure.colorbar(image, ax=axes, shrink=0.75 if len(axes) == 1 else 0.5, pad=0.015)
    bar.set_label({"cka": "CKA", "centred": "cosine, centred"}.get(key, "cosine similarity"))
    bar.outline.set_visible(False)
    data = pd.DataFrame(
        {"run": item.label, "first": i - 1, "second": j - 1, key: float(value)}
        for item in maps
        for (i, j), value in np.ndenumerate(item.arrays[key])
    )
    what, protocol = _WHAT.get(key, "Similarity"), maps[0].protocol_line()
    plot = Plot.of("similarity", figure, data, what=what, lowest=lowest, protocol=protocol)
    return dataclasses.replace(plot, name=name)


def _place(item: SimilarityFile) -> tuple[str, str]:
    """Return model and route: column and line, dense (the empty route) first."""
    route = "" if item.route == "none" else item.route
    return f"{item.backbone}-{item.protocol['size']}", route


def _similarity_map(
    ax: Axes, item: SimilarityFile, values: np.ndarray, lowest: float, crowded: bool
) -> Any:
    image = ax.imshow(values, vmin=lowest, vmax=1.0, cmap="magma", origin="upper")
    labels = ["in", *(str(i) for i in range(len(values) - 1))]
    every = (2 if crowded else 1) if len(labels) <= 14 else 4
    places = [0, *range(1, len(labels), every)]
    ax.set_xticks(places, [labels[i] for i in places])
    ax.set_yticks(places, [labels[i] for i in places])
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
    ax.set_title(item.label, color=colour(item.backbone))
    step, seed = (item.protocol.get(name, "?") for name in ("step", "seed_of_run"))
    ax.set_xlabel(f"block (step {step}, seed {seed})")
    return image


def similarity_maps(study: Study) -> Plot | None:
    """Draw the files `similarity.npz` of the study's run folders; None without one."""
    # One broken file must not take the other figures with it.
    maps = read_beside(study.runs, "similarity.npz", read)
    # One map per architecture and route says it; further seeds say it again.
    first = {item.label: item for item in reversed(maps)}
    return similarity([first[label] for label in sorted(first)]) if first else None
