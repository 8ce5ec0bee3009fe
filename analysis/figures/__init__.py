"""Every figure, by name: `analysis.figures.make("route_placement", "runs")`.

Each comes as PDF, PNG and CSV.
"""

import argparse
from pathlib import Path

from analysis.comparison.results import Results, Source, results_for_command
from analysis.errors import AnalysisError, pick

try:
    import matplotlib  # noqa: F401
except ValueError as error:  # MPLBACKEND names the backend of a package that is not installed
    raise AnalysisError(f"matplotlib cannot be imported: {str(error)[:150]}") from None

from analysis.figures.layer_maps import similarity, similarity_maps
from analysis.figures.scans import scan_paths, selections
from analysis.figures.style import Plot
from analysis.registry import builders

FIGURES = builders(
    __name__,
    {
        "convergence": "convergence:convergence",
        "step_penalty": "penalties:step_penalty",
        "equal_macs": "equal_macs:equal_macs",
        "route_placement": "route_ablations:placement",
        "selection_rate": "route_ablations:rate",
        "samples": "sample_grids:samples",
        "similarity": "layer_maps:similarity_maps",
        "guidance": "guidance_figures:guidance",
        "guidance_scale": "effective_scale:guidance_scale",
        "cost": "route_ablations:cost",
    },
)

__all__ = [
    "FIGURES", "Plot", "make", "make_all", "save", "scan_paths", "selections", "similarity",
    "similarity_maps",
]  # fmt: skip


def make(name: str, source: Source, metric: str | None = None) -> Plot | None:
    """Draw one figure; None if the runs lack its data.

    Raises:
        AnalysisError: If there is no such figure, runs folder or metric.
    """
    plot: Plot | None = pick("figure", name, FIGURES)(Results.of(source, metric))
    return plot


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
    results = results_for_command(options, "figure", FIGURES)
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
