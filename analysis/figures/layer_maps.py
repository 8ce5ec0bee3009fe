"""Inside a model: similarity of its layers (TREAD, Fig. 4), scan paths, tokens that stay."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.patches import Rectangle

from analysis.figures import style
from analysis.figures.style import Options, Plot, styled
from analysis.runs.cells import Study
from analysis.runs.run_records import AnalysisError, read_beside
from analysis.similarity import SimilarityFile, read
from routing.layout import Layout
from routing.rng import Draws
from routing.route import MODES, Route, keep_count
from routing.selection import Selection

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

    `AnalysisError` if there is no file, or one lacks the array.
    """
    maps = [item if isinstance(item, SimilarityFile) else read(item) for item in files]
    if not maps:
        raise AnalysisError("no similarity file; make one with python -m analysis similarity RUN")
    for item in maps:
        if key not in item.arrays:
            known = ", ".join(sorted(item.arrays))
            raise AnalysisError(f"{item.label} has no array {key!r}; it has {known}")
    if len({item.protocol.get("data") for item in maps}) > 1:  # titles name them, too
        own = [{**m.protocol, "size": "{size}, {data}".format_map(m.protocol)} for m in maps]
        maps = [dataclasses.replace(m, protocol=p) for m, p in zip(maps, own, strict=True)]
    lowest = min(float(np.nanmin(item.arrays[key])) for item in maps)
    # One line per route where every model has the same ones: read down and across.
    models, routes = (len(set(names)) for names in zip(*map(_place, maps), strict=True))
    whole = models <= 4 and models * routes == len(maps) == len({_place(item) for item in maps})
    maps = sorted(maps, key=lambda item: _place(item)[::-1]) if whole else maps
    columns = min(models if whole else 3, len(maps))
    side = (style.DOUBLE - 0.6) / columns if columns > 1 else style.SINGLE - 0.6
    figure, axes = style.panels(len(maps), columns, side + 0.35)
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
    what = _WHAT.get(key, "Similarity")
    protocol = " ".join(dict.fromkeys(item.protocol_line() for item in maps))
    plot = Plot.of("similarity", figure, data, what=what, lowest=lowest, protocol=protocol)
    return dataclasses.replace(plot, name=name)


def _place(item: SimilarityFile) -> tuple[str, str]:
    """Return model and route: column and line, dense (the empty route) first."""
    return item.model, item.route.replace("none", "")


def _similarity_map(
    ax: Axes, item: SimilarityFile, values: np.ndarray, lowest: float, crowded: bool
) -> Any:
    image = ax.imshow(values, vmin=lowest, vmax=1.0, cmap="magma", origin="upper")
    labels = ["in", *(str(i) for i in range(len(values) - 1))]
    every = (2 if crowded else 1) if len(labels) <= 14 else 4
    places = [0, *range(1, len(labels), every)]
    style.quiet(ax)
    ax.set_xticks(places, [labels[i] for i in places])
    ax.set_yticks(places, [labels[i] for i in places])
    ax.tick_params(length=0)
    for segment in Route.parse(item.route).segments:
        # Row and column 0 are the input: block i stands at i + 1.
        corner, size = segment.start + 0.5, segment.end - segment.start + 1
        look: Options = {"fill": False, "edgecolor": "#56B4E9", "linewidth": 1.8}
        ax.add_patch(Rectangle((corner, corner), size, size, **look))
    ax.set_title(item.label, color=style.colour(str(item.protocol["backbone"])))
    step, seed = (item.protocol.get(name, "?") for name in ("step", "seed_of_run"))
    ax.set_xlabel(f"block (step {step}, seed {seed})")
    return image


def similarity_maps(study: Study) -> Plot | None:
    """Draw the files `similarity.npz` of the study's run folders; None without one."""
    # One broken file must not take the other figures with it.
    maps = read_beside(study.runs, "similarity.npz", read)
    # One map per data set, architecture and route says it; further seeds say it again.
    first = {(item.protocol["data"], item.label): item for item in reversed(maps)}
    return similarity([first[name] for name in sorted(first)]) if first else None


# --- scan paths and selections --------------------------------------------------------------------

ORDERS = ("raster", "raster:reversed", *(f"zigzag:{k}" for k in range(8)))


def _subset(grid: tuple[int, int], mode: str, rate: float, seed: int) -> np.ndarray:
    """Ids that stay for one sample, drawn as training draws them."""
    draws = Draws(seed, 0, torch.tensor([0]))
    return Selection(mode).ids(draws, 0, grid, keep_count(grid[0] * grid[1], rate))[0].numpy()


@styled
def scan_paths(side: int = 8, rate: float = 0.5, seed: int = 0) -> Plot:
    """Draw every scan order on a `side` x `side` grid, all tokens above, a routed subset below."""
    grid, every = (side, side), np.arange(side * side)
    kept = _subset(grid, "random", rate, seed)
    columns = len(ORDERS) // 2
    figure, axes = style.canvas(6.2, 4, columns)
    data = []
    for index, name in enumerate(ORDERS):
        top, x = 2 * (index // columns), index % columns
        for y, ids in ((top, every), (top + 1, kept)):
            layout = Layout(grid, torch.from_numpy(ids).unsqueeze(0))
            order = ids[layout.order(name).perm.reshape(-1).numpy()]
            _path(axes[y][x], grid, order)
            part = "all tokens" if ids is every else "routed subset"
            data += [
                {"order": name, "tokens": part, "place": p, "row": i // side, "column": i % side}
                for p, i in enumerate(order.tolist())
            ]
        axes[top][x].set_title(name)
    for y in range(4):
        part = f"{len(kept)} of {side * side}, routed" if y % 2 else f"all {side * side} tokens"
        axes[y][0].set_ylabel(part)
    figure.legend(*axes[1][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return Plot.of("scan_paths", figure, data, side=side, rate=rate)


def _path(ax: Axes, grid: tuple[int, int], order: np.ndarray) -> None:
    rows, columns = np.divmod(order, grid[1])
    points = np.stack([columns, rows], axis=1).astype(float)
    segments = list(np.stack([points[:-1], points[1:]], axis=1))
    lines = LineCollection(segments, cmap="plasma", linewidths=1.1, zorder=2, capstyle="round")
    lines.set_array(np.linspace(0, 0.88, len(segments)))
    lines.set_clim(0, 1)
    gone = np.setdiff1d(np.arange(grid[0] * grid[1]), order)
    start: Options = {"marker": "s", "color": "#009E73", "zorder": 4, "label": "start"}
    end: Options = {"marker": "X", "color": "#D55E00", "zorder": 5, "label": "end", "linewidth": 0}
    stays: Options = {"color": "#1a1a1a", "zorder": 3, "label": "token that is scanned"}
    skips: Options = {"edgecolor": "#a0a0a0", "label": "token that skips the block"}
    ax.scatter(columns[:1], rows[:1], s=26, **start)
    ax.scatter(columns[-1:], rows[-1:], s=34, **end)
    ax.scatter(columns, rows, s=5, linewidth=0, **stays)
    ax.scatter(gone % grid[1], gone // grid[1], s=7, linewidth=0.6, facecolor="white", **skips)
    ax.add_collection(lines)
    ax.set(xlim=(-0.7, grid[1] - 0.3), ylim=(grid[0] - 0.3, -0.7), aspect="equal")
    style.quiet(ax)


@styled
def selections(side: int = 8, rate: float = 0.5, draws: int = 3) -> Plot:
    """Draw which tokens stay under every selection, for a few samples of a batch."""
    grid = (side, side)
    modes = [mode for mode in MODES if mode != "unsorted"]
    figure, axes = style.canvas(1.12 * draws + 0.3, draws, len(modes))
    data = []
    for x, mode in enumerate(modes):
        # `quad` keeps one token of every 2 x 2 and nothing else.
        share = 0.75 if mode == "quad" else rate
        for y in range(draws):
            ids = _subset(grid, mode, share, seed=y)
            stays = np.isin(np.arange(side * side), ids).reshape(grid)
            look: Options = {"cmap": "Blues", "vmin": -0.15, "vmax": 1.45, "edgecolors": "white"}
            axes[y][x].pcolormesh(stays, linewidth=0.8, **look)
            axes[y][x].set(aspect="equal", ylim=(side, 0))
            style.quiet(axes[y][x])
            data += [{"mode": mode, "rate": share, "draw": y, "id": int(i)} for i in ids]
        axes[0][x].set_title(f"{mode}, rate {share:g}", fontsize=7.5)
    for y in range(draws):
        axes[y][0].set_ylabel(f"draw {y}")
    return Plot.of("selections", figure, data)
