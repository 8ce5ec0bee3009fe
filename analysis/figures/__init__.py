"""Every figure, by name: `analysis.figures.make("route_placement", "runs")`.

Each comes as PDF, PNG and CSV.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from analysis.figures.block_cost import cost
from analysis.figures.convergence import convergence
from analysis.figures.guidance_maps import guidance
from analysis.figures.overview import overview
from analysis.figures.placement import placement
from analysis.figures.rate import rate
from analysis.figures.sample_grids import samples
from analysis.figures.scans import scan_paths, selections
from analysis.figures.similarity_maps import similarity
from analysis.figures.style import Plot
from analysis.runs.cells import Study
from analysis.runs.run_records import AnalysisError
from analysis.similarity_file import read
from routing.errors import suggest

Source = Study | pd.DataFrame | str | Path


def similarity_maps(study: Study) -> Plot | None:
    """Draw the similarity files that stand in the study's run folders (`similarity.npz`).

    None without one.
    """
    paths = [Path(str(path)) / "similarity.npz" for path in study.runs.get("path", [])]
    maps = []
    for path in paths:
        if path.is_file():
            try:
                maps.append(read(path))
            except AnalysisError as error:
                # One broken file must not take the other figures with it.
                warnings.warn(str(error), stacklevel=2)
    # One map per architecture and route says it; further seeds say it again.
    first = {item.label: item for item in reversed(maps)}
    return similarity([first[label] for label in sorted(first)]) if first else None


FIGURES: dict[str, Callable[[Study], Plot | None]] = {
    "overview": overview,
    "convergence": convergence,
    "route_placement": placement,
    "selection_rate": rate,
    "samples": samples,
    "similarity": similarity_maps,
    "guidance": guidance,
    "cost": cost,
    "scan_paths": lambda _: scan_paths(),
    "selections": lambda _: selections(),
}

__all__ = [
    "FIGURES",
    "Plot",
    "make",
    "make_all",
    "save",
    "scan_paths",
    "selections",
    "similarity",
    "similarity_maps",
]


def make(name: str, source: Source, metric: str | None = None) -> Plot | None:
    """Draw one figure; None where the runs do not give it.

    Raises:
        AnalysisError: if there is no such figure, runs folder or metric.
    """
    if name not in FIGURES:
        raise AnalysisError(
            f"no figure {name}; figures are {', '.join(FIGURES)}{suggest(name, FIGURES)}"
        )
    return FIGURES[name](Study.of(source, metric))


def make_all(source: Source, metric: str | None = None) -> list[Plot]:
    """Draw every figure that the runs give."""
    study = Study.of(source, metric)
    return [plot for builder in FIGURES.values() if (plot := builder(study)) is not None]


def save(plots: list[Plot], folder: str | Path) -> list[Path]:
    """Write every figure as PDF, PNG and CSV."""
    return [path for plot in plots for path in plot.save(folder)]
