"""`python -m analysis similarity`: measure runs, store the maps, and draw them."""

import argparse
from dataclasses import fields
from pathlib import Path

from analysis.figures.layer_maps import similarity as draw_maps
from analysis.measurements.measured import one_by_one, result_path, with_weights
from analysis.measurements.similarity import LEVELS, Protocol, measure
from experiments.runtime.console import show
from experiments.runtime.files import atomic_write


def command(options: argparse.Namespace) -> int:
    """Measure every run with weights below the folders given; store the map, draw it.

    Both go to the run's folder, of an exported file to the current one.
    """
    values = vars(options) | {"levels": tuple(options.levels or LEVELS)}
    protocol = Protocol(**{option.name: values[option.name] for option in fields(Protocol)})

    def measure_and_store(folder: Path) -> None:
        result = measure(folder, protocol)
        path = result_path(folder, "similarity.npz")
        picture = path.with_suffix(".png")
        result.save(path)
        atomic_write(picture, draw_maps([result]).png(dpi=200))
        show(f"{path}  {result.label}, lowest {result.cosine.min():.3f}, map in {picture.name}")

    one_by_one(with_weights(options.runs), measure_and_store)
    return 0
