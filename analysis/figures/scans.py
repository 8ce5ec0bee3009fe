"""Scan paths on a grid of tokens, and which tokens stay under every selection."""

from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection

from analysis.figures import style
from analysis.figures.style import Options, Plot, styled
from routing.layout import Layout
from routing.options import only_rate
from routing.rng import Draws
from routing.route import MODES, keep_count
from routing.routed_pass import Selection

_ZIGZAGS = tuple(f"zigzag:{number}" for number in range(8))
ORDERS = ("raster", "raster:reversed", *_ZIGZAGS)


def _selected(grid: tuple[int, int], mode: str, rate: float, seed: int) -> np.ndarray:
    """Return the ids that stay for one sample, selected as in training."""
    draws = Draws(seed, 0, torch.tensor([0]))
    return Selection(mode).ids(draws, 0, grid, keep_count(grid[0] * grid[1], rate))[0].numpy()


@styled
def scan_paths(side: int = 8, rate: float = 0.5, seed: int = 0) -> Plot:
    """Draw every scan order on a `side` x `side` grid, all tokens above, a routed subset below."""
    grid = (side, side)
    staying = _selected(grid, "random", rate, seed)
    columns = len(ORDERS) // 2
    figure, axes = style.canvas(6.2, 4, columns)
    data: list[dict[str, Any]] = []
    for index, name in enumerate(ORDERS):
        top, x = 2 * (index // columns), index % columns
        axes[top][x].set_title(name)
        subsets = {"all tokens": np.arange(side * side), "routed subset": staying}
        for y, (tokens, ids) in enumerate(subsets.items(), top):
            layout = Layout(grid, torch.from_numpy(ids).unsqueeze(0))
            order = ids[layout.permutation(name).reshape(-1).numpy()]
            _draw_path(axes[y][x], grid, order)
            for position, token in enumerate(order.tolist()):
                row = {"order": name, "tokens": tokens, "place": position}
                data.append({**row, "row": token // side, "column": token % side})
    for y in range(4):
        label = f"{len(staying)} of {side * side}, routed" if y % 2 else f"all {side * side} tokens"
        axes[y][0].set_ylabel(label)
    figure.legend(*axes[1][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return Plot.of("scan_paths", figure, data, side=side, rate=rate)


def _draw_path(ax: Axes, grid: tuple[int, int], order: np.ndarray) -> None:
    rows, columns = np.divmod(order, grid[1])
    points = np.stack([columns, rows], axis=1).astype(float)
    segments = list(np.stack([points[:-1], points[1:]], axis=1))
    lines = LineCollection(segments, cmap="plasma", linewidths=1.1, zorder=2, capstyle="round")
    lines.set_array(np.linspace(0, 0.88, len(segments)))
    lines.set_clim(0, 1)
    absent = np.setdiff1d(np.arange(grid[0] * grid[1]), order)
    start: Options = {"marker": "s", "color": "#009E73", "zorder": 4, "label": "start"}
    end: Options = {"marker": "X", "color": "#D55E00", "zorder": 5, "label": "end", "linewidth": 0}
    stays: Options = {"color": "#1a1a1a", "zorder": 3, "label": "token that is scanned"}
    skips: Options = {"edgecolor": "#a0a0a0", "label": "token that skips the block"}
    ax.scatter(columns[:1], rows[:1], s=26, **start)
    ax.scatter(columns[-1:], rows[-1:], s=34, **end)
    ax.scatter(columns, rows, s=5, linewidth=0, **stays)
    x, y = absent % grid[1], absent // grid[1]
    ax.scatter(x, y, s=7, linewidth=0.6, facecolor="white", **skips)
    ax.add_collection(lines)
    ax.set(xlim=(-0.7, grid[1] - 0.3), ylim=(grid[0] - 0.3, -0.7), aspect="equal")
    style.quiet(ax)


@styled
def selections(side: int = 8, rate: float = 0.5, draws: int = 3) -> Plot:
    """Draw which tokens stay under every selection, for a few samples of a batch."""
    grid = (side, side)
    modes = [mode for mode in MODES if mode != "unsorted"]
    figure, axes = style.canvas(1.12 * draws + 0.3, draws, len(modes))
    look: Options = {"cmap": "Blues", "vmin": -0.15, "vmax": 1.45, "edgecolors": "white"}
    data = []
    for x, mode in enumerate(modes):
        share = only_rate(mode) or rate
        axes[0][x].set_title(f"{mode}, rate {share:g}", fontsize=7.5)
        for y in range(draws):
            ids = _selected(grid, mode, share, seed=y)
            stays = np.isin(np.arange(side * side), ids).reshape(grid)
            axes[y][x].pcolormesh(stays, linewidth=0.8, **look)
            axes[y][x].set(aspect="equal", ylim=(side, 0))
            style.quiet(axes[y][x])
            for token in ids.tolist():
                data.append({"mode": mode, "rate": share, "draw": y, "id": token})
    for y in range(draws):
        axes[y][0].set_ylabel(f"draw {y}")
    return Plot.of("selections", figure, data)
