"""`python -m analysis guidance-scale`: measure runs, store the results, and show them."""

import argparse
import json
from pathlib import Path
from typing import Any

from analysis.figures.effective_scale import effective_scale
from analysis.measurements.guidance_scale import Measurement, Weights
from analysis.measurements.guidance_scale_file import FILE, LEVELS
from analysis.measurements.measured import one_by_one, result_path, with_weights
from analysis.tables.guidance_scale import scale_table
from analysis.tables.render import write
from analysis.tables.table import markdown
from experiments.config.parent import split
from experiments.runtime.console import show
from experiments.runtime.files import atomic_write


def command(options: argparse.Namespace) -> int:
    """Measure every run with weights, and store the result in its folder or the current one."""
    runs = with_weights(options.runs)
    against = None if options.against is None else Weights(*split(options.against, "--against "))
    measurement = Measurement(runs, options.levels or LEVELS, options.samples, options.batch)
    if against:
        measurement.open(*against)  # a fault in it is reported once, before anything is measured
    results: list[dict[str, Any]] = []
    if options.out:  # a fault in the folder, too
        (options.out / "tables").mkdir(parents=True, exist_ok=True)

    def measure_and_store(run: Path) -> None:
        result = measurement.measure(run, against)
        results.append(result)
        path = result_path(run, FILE)
        atomic_write(path, json.dumps(result, indent=1) + "\n")
        show(f"{markdown(scale_table([result], levels=True))}\n{path}\n")

    try:
        one_by_one(runs, measure_and_store)
    finally:  # also of what could be measured where some could not
        if options.out and results:
            write(scale_table(results), options.out / "tables")
            plot = effective_scale(results)
            if plot:
                plot.save(options.out / "figures")
            show(f"{options.out}  guidance_scale in tables{' and figures' if plot else ''}")
    return 0
