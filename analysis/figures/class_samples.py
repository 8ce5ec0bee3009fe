"""Samples of the published Fashion-MNIST runs, one row per class with its name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from analysis.errors import AnalysisError
from analysis.figures.sample_grids import picture
from analysis.figures.style import Plot, canvas, colour, styled
from analysis.loading import load

#: Names of the classes (Xiao et al. 2017, Table 2).
CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
    "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
BACKBONES = ("dit", "mamba", "rwkv")
_SHOWN = 4  # of the eight samples of a class
_PER_CLASS = 8  # in the picture of a run
_CAPTION = (
    "Dense and routed runs of seed {seed} after {steps:,} steps, without guidance: the same noise "
    "and the same classes."
)


@styled
def draw(records: Path, seed: int = 0, steps: int = 3000) -> Plot:
    """Draw the last samples of dense and routed runs of one seed side by side.

    Raises:
        AnalysisError: The picture of a run is missing.
    """
    runs = load(records)
    chosen = (runs["data"] == "fashion") & (runs["seed"] == seed) & (runs["step"] == steps)
    figure, axes = canvas(3.1, 1, 2 * len(BACKBONES))
    rows = []
    for column in range(2 * len(BACKBONES)):
        backbone, is_routed = BACKBONES[column // 2], column % 2 == 1
        is_arm = (runs["backbone"] == backbone) & ((runs["route"] != "none") == is_routed)
        run = runs[chosen & is_arm].iloc[0]
        image = picture(run["path"])
        if image is None:
            raise AnalysisError(f"{run['run']} has no samples/final.png; take another seed")
        pitch = image.shape[1] // _PER_CLASS
        ax = axes[0, column]
        ax.imshow(image[: len(CLASSES) * pitch, : _SHOWN * pitch], interpolation="nearest")
        ax.grid(False)
        ax.set_xticks([])
        ax.set_yticks((np.arange(len(CLASSES)) + 0.5) * pitch, CLASSES if column == 0 else [])
        ax.tick_params(length=0)
        title = f"{backbone}\n{run['route'] if is_routed else 'dense'}"
        ax.set_title(title, color=colour(backbone), fontsize=8)
        rows.append({"backbone": backbone, "route": run["route"], "run": run["run"]})
    caption = _CAPTION.format(seed=seed, steps=steps)
    return Plot("samples_fashion", "Samples by class", caption, figure, pd.DataFrame(rows))
