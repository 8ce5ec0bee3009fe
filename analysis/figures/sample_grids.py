"""Sample grids of dense and routed runs."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from PIL import Image

from analysis.comparison.groups import Group, Variant
from analysis.comparison.results import Results
from analysis.figures import style
from analysis.figures.style import Plot, styled
from analysis.runs.grouping import shared_label, short_labels
from analysis.runs.run_files import class_names
from analysis.tables.entries import metric_decimals, metric_label

_MOST_LINES = 3  # of panels, on one page
# A larger picture is no sample grid and could fill the memory.
_MOST_PIXELS = 64_000_000
# Pictures of one class beside each other in a sample grid (experiments/training/run_evaluation.py).
_PER_CLASS = 8
# Class names of Fashion-MNIST (Xiao et al. 2017, Table 2), for records without weights.
_FASHION = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
    "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
_LONGEST_NAME = 14  # characters of a class name that are shown
_NAME_INCHES = 0.065  # of a character of a name that stands upright


class SampleGrid(NamedTuple):
    """A variant's run and its sample grid."""

    variant: Variant
    run: dict[Any, Any]
    image: np.ndarray


def picture(run: str | Path) -> np.ndarray | None:
    """Return a run's last sample grid, uint8 (H, W, 3); None if none can be read."""
    try:
        with Image.open(Path(run) / "samples" / "final.png") as image:
            if image.width * image.height > _MOST_PIXELS or image.format != "PNG":
                return None
            pitch = image.width // _PER_CLASS
            return np.asarray(image.convert("RGB")) if 0 < pitch <= image.height else None
    except (OSError, Image.DecompressionBombError, SyntaxError, ValueError):
        return None


def comparable_grids(group: Group) -> list[SampleGrid]:
    """Return dense and guideline variants with runs and pictures of one seed and step.

    The step is preferably that of the variants, else the largest; the seed is the lowest.
    """
    variants = [variant for variant in group.pair() if variant is not None]
    if not variants:
        return []
    runs_by_key = []
    for variant in variants:
        columns = ["run", "path", "seed", "step", f"score.{group.metric}"]
        runs = variant.runs.reindex(columns=columns).dropna(subset=["seed", "step"])
        records = runs.to_dict("records")
        runs_by_key.append({(run["step"], run["seed"]): run for run in records})
    common = set.intersection(*map(set, runs_by_key))
    own_step = variants[-1].step
    for key in sorted(common, key=lambda key: (key[0] != own_step, -key[0], key[1])):
        grids = []
        for variant, keyed_runs in zip(variants, runs_by_key, strict=True):
            image = picture(str(keyed_runs[key]["path"]))
            if image is not None:
                grids.append(SampleGrid(variant, keyed_runs[key], image))
        if len(grids) == len(variants):
            return grids
    return []


def turned(grid: np.ndarray) -> np.ndarray:
    """Turn a grid of one row per class into one column per class, its first pictures."""
    pitch = grid.shape[1] // _PER_CLASS
    rows = grid.shape[0] // pitch
    # About a third as tall as wide.
    shown = min(max(2, round(0.35 * rows)), _PER_CLASS)
    cut = grid[: rows * pitch, : shown * pitch].reshape(rows, pitch, shown, pitch, 3)
    return cut.transpose(2, 1, 0, 3, 4).reshape(shown * pitch, rows * pitch, 3)


def height(grids: Sequence[SampleGrid], columns: int) -> float:
    """Return the inches of a column of turned grids with class names, one of `columns` columns."""
    tall, wide, _ = turned(grids[0].image).shape
    width = style.SINGLE if columns == 1 else style.DOUBLE / columns - 0.15
    longest = max(map(len, _class_labels(grids[-1])), default=0)
    return len(grids) * width * tall / wide + _NAME_INCHES * longest


def _class_labels(grid: SampleGrid) -> list[str]:
    """Return the names of the classes that a turned grid's columns show, their numbers without.

    Nothing where the columns are not classes.
    """
    pitch = grid.image.shape[1] // _PER_CLASS
    classes = grid.image.shape[0] // pitch
    if str(grid.variant.first("config.task", "class")) != "class" or classes < 2:
        return []
    names = class_names(grid.run["path"])
    if not names and grid.variant.first("data") == "fashion":
        names = list(_FASHION)
    if len(names) < classes:
        return list(map(str, range(classes)))
    labels = []
    for name in names[:classes]:
        labels.append(name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}\u2026")
    return labels


def show(ax: Axes, grid: SampleGrid, labelled: bool) -> None:
    """Draw a turned grid, with the classes below its columns where `labelled`."""
    image = turned(grid.image)
    ax.imshow(image, interpolation="nearest", aspect="auto")
    style.quiet(ax)
    labels = _class_labels(grid) if labelled else []
    if labels:
        pitch = image.shape[1] / len(labels)
        upright = 90 if max(map(len, labels)) > 2 else 0
        ax.set_xticks((np.arange(len(labels)) + 0.5) * pitch, labels, rotation=upright)
        ax.tick_params(length=0, pad=1)


@styled
def samples(results: Results) -> Plot | None:
    """Draw dense above routed, a column per group and its lines of panels per config and steps.

    None without a sample grid.
    """
    panels = _sample_panels(results)
    if not panels:
        return None
    lines_by_config: dict[tuple[str, int], list[tuple[Group, list[SampleGrid]]]] = {}
    for group, grids in panels:
        key = group.shared_config, grids[0].run["step"]
        lines_by_config.setdefault(key, []).append((group, grids))
    lines, more = style.fitting(list(lines_by_config.values()), _MOST_LINES, len)
    columns = max(map(len, lines))
    per_group = len(panels[0][1])  # lines of panels: dense and routed, or the one that there is
    tall = 0.42 * per_group * len(lines)
    for line in lines:
        _, grids = line[0]
        tall += height(grids, columns)
    figure, axes = style.canvas(tall, per_group * len(lines), columns)
    for ax in axes.flat:
        ax.set_visible(False)
    names = short_labels(group.label for group, _ in panels)
    # About 17 characters an inch.
    width = int(17 * figure.get_figwidth() / columns)
    data: list[dict[str, Any]] = []
    for y, line in enumerate(lines):
        for x, (group, grids) in enumerate(line):
            for index, grid in enumerate(grids):
                ax = axes[per_group * y + index][x]
                ax.set_visible(True)
                show(ax, grid, labelled=index == per_group - 1)
                title = f"{fill(names[group.label], width)}\n{fill(_grid_text(group, grid), width)}"
                ax.set_title(title, color=style.colour(group.backbone), fontsize=7)
                data.append(_grid_row(group, grid))
    return Plot.of("samples", figure, data, names=shared_label(names), more=more)


def _sample_panels(results: Results) -> list[tuple[Group, list[SampleGrid]]]:
    """Return groups with both grids; where there is none, those with one."""
    pairs, singles = [], []
    for group in results.groups:
        grids = comparable_grids(group)
        if len(grids) == 2:
            pairs.append((group, grids))
        elif grids:
            singles.append((group, grids))
    return pairs or singles


def _grid_text(group: Group, grid: SampleGrid) -> str:
    text = f"{grid.variant.name}, step {grid.run['step']}, seed {grid.run['seed']}"
    score = grid.run.get(f"score.{group.metric}")
    if not pd.isna(score):
        metric = metric_label(group.metric).partition(" (")[0]
        text += f", {metric} {score:.{metric_decimals(group.metric)}f}"
    return text


def _grid_row(group: Group, grid: SampleGrid) -> dict[str, Any]:
    row = {"panel": group.label, "variant": grid.variant.name, "step": grid.run["step"]}
    row |= {"run": grid.run["run"], "seed": grid.run["seed"]}
    return {**row, "score": grid.run.get(f"score.{group.metric}"), "metric": group.metric}
