"""Every figure, by name: `analysis.figures.make("route_placement", "runs")`.

Each comes as PDF, PNG and CSV.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from analysis.errors import pick
from analysis.figures.convergence import convergence, methods
from analysis.figures.effective_scale import effective_scale
from analysis.figures.guidance_figures import guidance, response
from analysis.figures.layer_maps import similarity, similarity_maps
from analysis.figures.route_ablations import cost, placement, rate
from analysis.figures.sample_grids import overview, samples
from analysis.figures.scans import scan_paths, selections
from analysis.figures.style import Plot
from analysis.results import Results, Source, results_for_command
from analysis.tables.guidance_scale import stored_scales


def _guidance_scale(results: Results) -> Plot | None:
    return effective_scale(stored_scales(results))


def _scan_paths(results: Results) -> Plot:
    return scan_paths()


def _selections(results: Results) -> Plot:
    return selections()


FIGURES: dict[str, Callable[[Results], Plot | None]] = {
    "overview": overview,
    "convergence": convergence,
    "methods": methods,
    "route_placement": placement,
    "selection_rate": rate,
    "samples": samples,
    "similarity": similarity_maps,
    "response": response,
    "guidance": guidance,
    "guidance_scale": _guidance_scale,
    "cost": cost,
    "scan_paths": _scan_paths,
    "selections": _selections,
}

__all__ = [
    "FIGURES", "Plot", "make", "make_all", "save", "scan_paths", "selections", "similarity",
    "similarity_maps",
]  # fmt: skip


def make(name: str, source: Source, metric: str | None = None) -> Plot | None:
    """Draw one figure; None where the runs do not give it.

    `AnalysisError` if there is no such figure, runs folder or metric.
    """
    return pick("figure", name, FIGURES)(Results.of(source, metric))


def make_all(source: Source, metric: str | None = None) -> list[Plot]:
    """Draw every figure that the runs give."""
    results = Results.of(source, metric)
    plots = []
    for draw in FIGURES.values():
        plot = draw(results)
        if plot is not None:
            plots.append(plot)
    return plots


def save(plots: list[Plot], folder: str | Path) -> list[Path]:
    """Write every figure as PDF, PNG and CSV."""
    paths = []
    for plot in plots:
        paths += plot.save(folder)
    return paths


def command(options: argparse.Namespace) -> int:
    """Write the figures that runs give."""
    results = results_for_command(options)
    plots, not_given = [], []
    for name in options.only or FIGURES:
        plot = make(name, results)
        if plot is None:
            not_given.append(name)
        else:
            plots.append(plot)
    folder = options.out or options.runs / "figures"
    save(plots, folder)
    if plots:
        print(f"{folder}  {', '.join(plot.name for plot in plots)}")
    if not_given:
        print(f"not given by these runs: {', '.join(not_given)}")
    return 0
