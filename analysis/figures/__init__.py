"""Every figure, by name: `analysis.figures.make("route_placement", "runs")`.

Each comes as PDF, PNG and CSV.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from analysis.figures.convergence import convergence, methods, overview, samples
from analysis.figures.guidance_figures import draw, guidance, response
from analysis.figures.layer_maps import scan_paths, selections, similarity, similarity_maps
from analysis.figures.route_ablations import cost, placement, rate
from analysis.figures.style import Plot
from analysis.runs.cells import Source, Study, study_for_command
from analysis.runs.run_records import pick
from analysis.tables.guidance_table import stored_scales

FIGURES: dict[str, Callable[[Study], Plot | None]] = {
    "overview": overview,
    "convergence": convergence,
    "methods": methods,
    "route_placement": placement,
    "selection_rate": rate,
    "samples": samples,
    "similarity": similarity_maps,
    "response": response,
    "guidance": guidance,
    "guidance_scale": lambda study: draw(stored_scales(study)),
    "cost": cost,
    "scan_paths": lambda _: scan_paths(),
    "selections": lambda _: selections(),
}

__all__ = [
    "FIGURES", "Plot", "make", "make_all", "save", "scan_paths", "selections", "similarity",
    "similarity_maps",
]  # fmt: skip


def make(name: str, source: Source, metric: str | None = None) -> Plot | None:
    """Draw one figure; None where the runs do not give it.

    `AnalysisError` if there is no such figure, runs folder or metric.
    """
    return pick("figure", name, FIGURES)(Study.of(source, metric))


def make_all(source: Source, metric: str | None = None) -> list[Plot]:
    """Draw every figure that the runs give."""
    study = Study.of(source, metric)
    return [plot for builder in FIGURES.values() if (plot := builder(study)) is not None]


def save(plots: list[Plot], folder: str | Path) -> list[Path]:
    """Write every figure as PDF, PNG and CSV."""
    return [path for plot in plots for path in plot.save(folder)]


def command(options: argparse.Namespace) -> int:
    """Write the figures that runs give."""
    study = study_for_command(options)
    drawn = {name: make(name, study) for name in options.only or FIGURES}
    plots = [plot for plot in drawn.values() if plot is not None]
    folder = options.out or options.runs / "figures"
    save(plots, folder)
    if plots:
        print(f"{folder}  {', '.join(plot.name for plot in plots)}")
    if left := [name for name, plot in drawn.items() if plot is None]:
        print(f"not given by these runs: {', '.join(left)}")
    return 0
