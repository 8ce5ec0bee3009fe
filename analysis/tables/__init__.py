"""Every table, by name: `analysis.tables.make("route_placement", "runs")`.

Each builder takes a `Study` and returns a `Table` with our numbers (mean +- std, n) and the paper's
beside them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from analysis.runs.cells import Study, study_for_command
from analysis.runs.run_records import AnalysisError
from analysis.tables import (
    ablations,
    equal_cost,
    guidance_table,
    main_table,
    throughput,
)
from analysis.tables.render import document, write
from analysis.tables.table import Table, markdown
from experiments.runtime.files import atomic_write
from routing.errors import suggest

TABLES: dict[str, Callable[[Study], Table]] = {
    "speedup": equal_cost.headline,
    "main": main_table.main,
    "sota": main_table.sota,
    "route_placement": ablations.placement,
    "selection_rate": ablations.rate,
    "relative_absolute": ablations.scaling,
    "high_res": main_table.high_res,
    "text": main_table.text,
    "tokens": main_table.tokens,
    "one_two_routes": ablations.routes,
    "masking": equal_cost.masking,
    "guidance": guidance_table.guidance,
    "throughput": throughput.throughput,
    "scan_order": ablations.scan_order,
    "differences": main_table.differences,
    "all_scores": main_table.all_scores,
    "followups": main_table.followups,
}

__all__ = ["TABLES", "Table", "make", "make_all", "save"]


def make(name: str, source: Study | pd.DataFrame | str | Path, metric: str | None = None) -> Table:
    """Build one table.

    Args:
        name: One of `TABLES`.
        source: Runs folder, loaded runs or a study.
        metric: Full name of the metric; None takes each base's Frechet distance.

    Raises:
        AnalysisError: if there is no such table, runs folder or metric.
    """
    if name not in TABLES:
        raise AnalysisError(
            f"no table {name}; tables are {', '.join(TABLES)}{suggest(name, TABLES)}"
        )
    return TABLES[name](Study.of(source, metric))


def make_all(source: Study | pd.DataFrame | str | Path, metric: str | None = None) -> list[Table]:
    """Build every table; `Table.covered` says whether our runs give any of its numbers."""
    study = Study.of(source, metric)
    return [builder(study) for builder in TABLES.values()]


def save(tables: list[Table], folder: str | Path) -> list[Path]:
    """Write tables in all formats, and `tables.tex`, a document that compiles as it is."""
    paths = [path for table in tables for path in write(table, folder)]
    atomic_write(Path(folder) / "tables.tex", document(tables))
    return [*paths, Path(folder) / "tables.tex"]


def command(options: argparse.Namespace) -> int:
    """Write the tables that runs give, or print them."""
    study = study_for_command(options)
    made = [make(name, study) for name in options.only or TABLES]
    chosen = made if options.all or options.only else [table for table in made if table.covered]
    if options.print:
        print("\n".join(markdown(table) for table in chosen), end="")
        return 0
    folder = options.out or options.runs / "tables"
    save(chosen, folder)
    print(f"{folder}  {', '.join(table.name for table in chosen) or 'no table: no finished run'}")
    left = [table.name for table in made if table not in chosen]
    if left:
        print(f"not covered by these runs (--all writes them too): {', '.join(left)}")
    return 0
