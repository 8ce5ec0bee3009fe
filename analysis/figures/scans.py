"""Scan paths with a routed subset, and which tokens every selection keeps."""

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection

from analysis.figures.style import Options, Plot, canvas, quiet, styled
from routing.layout import Layout
from routing.rng import Draws
from routing.route import MODES, keep_count
from routing.selection import Selection

ORDERS = ("raster", "raster:reversed", *(f"zigzag:{k}" for k in range(8)))
_KEPT, _GONE = "#1a1a1a", "#a0a0a0"


def _subset(grid: tuple[int, int], mode: str, rate: float, seed: int) -> np.ndarray:
    """Ids that stay for one sample, drawn as training draws them."""
    draws = Draws(seed, 0, torch.tensor([0]))
    return Selection(mode).ids(draws, 0, grid, keep_count(grid[0] * grid[1], rate))[0].numpy()


def _walk(grid: tuple[int, int], name: str, ids: np.ndarray | None) -> np.ndarray:
    """Raster ids in the order in which a block scans them."""
    layout = Layout(grid, None if ids is None else torch.from_numpy(ids).unsqueeze(0))
    perm = layout.order(name).perm.reshape(-1).numpy()
    return perm if ids is None else ids[perm]


@styled
def scan_paths(side: int = 8, rate: float = 0.5, seed: int = 0) -> Plot:
    """Draw every scan order on a `side` x `side` grid, all tokens above, a routed subset below."""
    grid = (side, side)
    kept = _subset(grid, "random", rate, seed)
    columns = len(ORDERS) // 2
    figure, axes = canvas(6.2, 4, columns)
    data = []
    for index, name in enumerate(ORDERS):
        top, x = 2 * (index // columns), index % columns
        for y, ids in ((top, None), (top + 1, kept)):
            order = _walk(grid, name, ids)
            _path(axes[y][x], grid, order, kept if ids is not None else np.arange(side * side))
            part = "all tokens" if ids is None else "routed subset"
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


def _path(ax: Axes, grid: tuple[int, int], order: np.ndarray, present: np.ndarray) -> None:
    rows, columns = np.divmod(order, grid[1])
    points = np.stack([columns, rows], axis=1).astype(float)
    segments = np.stack([points[:-1], points[1:]], axis=1)
    lines = LineCollection(
        list(segments), cmap=colormaps["plasma"], linewidths=1.1, zorder=2, capstyle="round"
    )
    lines.set_array(np.linspace(0, 0.88, len(segments)))
    lines.set_clim(0, 1)
    every = np.arange(grid[0] * grid[1])
    gone = np.setdiff1d(every, present)
    start: Options = {"marker": "s", "color": "#009E73", "zorder": 4, "label": "start"}
    end: Options = {"marker": "X", "color": "#D55E00", "zorder": 5, "label": "end", "linewidth": 0}
    stays: Options = {"color": _KEPT, "zorder": 3, "label": "token that is scanned", "linewidth": 0}
    skips: Options = {"edgecolor": _GONE, "linewidth": 0.6, "label": "token that skips the block"}
    ax.scatter(columns[:1], rows[:1], s=26, **start)
    ax.scatter(columns[-1:], rows[-1:], s=34, **end)
    ax.scatter(columns, rows, s=5, **stays)
    ax.scatter(gone % grid[1], gone // grid[1], s=7, facecolor="white", **skips)
    ax.add_collection(lines)
    ax.set(xlim=(-0.7, grid[1] - 0.3), ylim=(grid[0] - 0.3, -0.7), aspect="equal")
    quiet(ax)


@styled
def selections(side: int = 8, rate: float = 0.5, draws: int = 3) -> Plot:
    """Draw which tokens stay under every selection, for a few samples of a batch."""
    grid = (side, side)
    modes = [mode for mode in MODES if mode != "unsorted"]
    figure, axes = canvas(1.12 * draws + 0.3, draws, len(modes))
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
            quiet(axes[y][x])
            data += [{"mode": mode, "rate": share, "draw": y, "id": int(i)} for i in ids]
        axes[0][x].set_title(f"{mode}, rate {share:g}", fontsize=7.5)
    for y in range(draws):
        axes[y][0].set_ylabel(f"draw {y}")
    return Plot.of("selections", figure, data)
