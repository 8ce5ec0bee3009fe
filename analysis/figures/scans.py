"""Scan paths with a routed subset, and which tokens every selection keeps."""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection

from analysis.figures.style import Options, Plot, canvas, colormap, quiet, styled
from routing.layout import Layout
from routing.rng import Draws
from routing.route import MODES, keep_count
from routing.selection import Selection

ORDERS = ("raster", "raster:reversed", *(f"zigzag:{k}" for k in range(8)))
_KEPT, _GONE = "#1a1a1a", "#c8c8c8"


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
    figure, axes = canvas(1.75 * columns, 1.95 * 4, 4, columns)
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
    for y in (1, 3):
        axes[y][0].set_ylabel(f"{len(kept)} of {side * side}", fontsize=8)
    caption = (
        f"Every scan order on a grid of {side} x {side} tokens, from dark to bright. Below each, "
        f"the same path with the tokens of one random draw at rate {rate:g} left out (grey): what "
        "a block inside a route walks, in the same order."
    )
    return Plot("scan_paths", "Scan paths", caption, figure, pd.DataFrame(data))


def _path(ax: Axes, grid: tuple[int, int], order: np.ndarray, present: np.ndarray) -> None:
    rows, columns = np.divmod(order, grid[1])
    points = np.stack([columns, rows], axis=1).astype(float)
    segments = np.stack([points[:-1], points[1:]], axis=1)
    lines = LineCollection(
        list(segments), cmap=colormap("plasma"), linewidths=1.4, zorder=2, capstyle="round"
    )
    lines.set_array(np.linspace(0, 0.88, len(segments)))
    lines.set_clim(0, 1)
    every = np.arange(grid[0] * grid[1])
    gone = np.setdiff1d(every, present)
    left_out: Options = {"facecolor": "white", "edgecolor": _GONE, "linewidth": 0.6}
    ax.scatter(gone % grid[1], gone // grid[1], s=7, zorder=1, **left_out)
    ax.add_collection(lines)
    ax.scatter(columns, rows, s=8, color=_KEPT, zorder=3)
    ax.scatter(columns[:1], rows[:1], s=34, marker="s", color="#009E73", zorder=4)
    ax.scatter(columns[-1:], rows[-1:], s=34, marker="X", color="#D55E00", linewidth=0, zorder=4)
    ax.set(xlim=(-0.7, grid[1] - 0.3), ylim=(grid[0] - 0.3, -0.7), aspect="equal")
    quiet(ax)


@styled
def selections(side: int = 8, rate: float = 0.5, draws: int = 3) -> Plot:
    """Draw which tokens stay under every selection, for a few samples of a batch."""
    grid = (side, side)
    modes = [mode for mode in MODES if mode != "unsorted"]
    figure, axes = canvas(1.35 * len(modes), 1.42 * draws + 0.3, draws, len(modes))
    data = []
    for x, mode in enumerate(modes):
        # `quad` keeps one token of every 2 x 2 and nothing else.
        share = 0.75 if mode == "quad" else rate
        for y in range(draws):
            ids = _subset(grid, mode, share, seed=y)
            mask = np.zeros(side * side)
            mask[ids] = 1
            axes[y][x].imshow(mask.reshape(grid), cmap="Blues", vmin=-0.15, vmax=1.45)
            quiet(axes[y][x])
            axes[y][x].set_xticks(np.arange(-0.5, side), [])
            axes[y][x].set_yticks(np.arange(-0.5, side), [])
            axes[y][x].grid(visible=True, color="white", linewidth=0.8)
            axes[y][x].tick_params(length=0)
            data += [{"mode": mode, "rate": share, "draw": y, "id": int(i)} for i in ids]
        axes[0][x].set_title(f"{mode}\nrate {share:g}", fontsize=8)
    caption = (
        "Tokens that stay inside a route (dark), for three draws. The control, unsorted, keeps the "
        "tokens of random and shuffles the scan."
    )
    return Plot("selections", "Which tokens stay", caption, figure, pd.DataFrame(data))
