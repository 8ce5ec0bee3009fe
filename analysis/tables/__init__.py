"""Every table, by name: `analysis.tables.make("route_placement", "runs")`.

Each builder takes `Results` and returns a `Table` with our numbers (mean +- half-width of its 95 %
interval, n) and the paper's beside them where they compare.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from analysis.comparison.results import Results, Source, results_for_command
from analysis.errors import AnalysisError, pick
from analysis.registry import builders
from analysis.tables.code_versions import code_notes
from analysis.tables.render import PREAMBLE, document, write
from analysis.tables.table import Table, markdown
from experiments.runtime.console import show
from experiments.runtime.files import atomic_write

TABLES = builders(
    __name__,
    {
        "main": "main:main",
        "summary": "summary:summary",
        "steps": "summary:steps_and_cost",
        "treatments": "summary:treatments",
        "equal_macs": "equal_macs:equal_macs",
        "speedup": "speedup:headline",
        "tails": "tails:tails",
        "sota": "main:sota",
        "route_placement": "ablations:route_placement",
        "selection_rate": "ablations:selection_rate",
        "relative_absolute": "ablations:relative_absolute",
        "high_res": "resolution:high_res",
        "text": "resolution:text",
        "tokens": "resolution:tokens",
        "one_two_routes": "ablations:one_two_routes",
        "masking": "speedup:masking",
        "response": "guidance:response",
        "guidance": "guidance:guidance",
        "guidance_scale": "guidance_scale:guidance_scale",
        "throughput": "cost:throughput",
        "benchmark": "cost:benchmark",
        "scan_order": "ablations:scan_order",
        "differences": "every_score:differences",
        "all_scores": "every_score:all_scores",
        "followups": "main:followups",
    },
)

__all__ = ["TABLES", "Table", "make", "make_all", "save"]


def make(name: str, source: Source, metric: str | None = None) -> Table:
    """Build one table.

    Args:
        name: One of `TABLES`.
        source: Runs folder, loaded runs, scores with the columns of their runs, or `Results`.
        metric: Full name of the metric; None takes each group's Frechet distance.

    Raises:
        AnalysisError: if there is no such table, runs folder or metric.
    """
    results = Results.of(source, metric)
    table: Table = pick("table", name, TABLES)(results)
    if results.curves is not None:  # of another trainer, which has no versions of our code
        return table
    return dataclasses.replace(table, notes=(*table.notes, *code_notes(results, table)))


def make_all(source: Source, metric: str | None = None) -> list[Table]:
    """Build every table; `Table.covered` says whether our runs give any of its numbers."""
    results = Results.of(source, metric)
    return [make(name, results) for name in TABLES]


def column_indices(table: Table, names: Sequence[str]) -> list[int]:
    """Return the indices of a table's first column and of those named by heading or number.

    `AnalysisError` if it has no such column.
    """
    indices = {column.label.casefold(): index for index, column in enumerate(table.columns)}
    for index in range(len(table.columns)):
        indices[str(index)] = index
    chosen = {0: None}
    for name in names:
        if name.casefold() not in indices:
            listing = ", ".join(f"{i} {column.label!r}" for i, column in enumerate(table.columns))
            raise AnalysisError(f"table {table.name} has no column {name!r}; it has {listing}")
        chosen[indices[name.casefold()]] = None
    return list(chosen)


def save(tables: list[Table], folder: str | Path) -> list[Path]:
    """Write tables in all formats, `preamble.tex` and `tables.tex`, which compiles as it is."""
    paths = []
    for table in tables:
        paths += write(table, folder)
    for name, text in (("preamble.tex", PREAMBLE), ("tables.tex", document(tables))):
        paths.append(Path(folder) / name)
        atomic_write(paths[-1], text)
    return paths


def command(options: argparse.Namespace) -> int:
    """Write the tables that runs give, or print them."""
    results = results_for_command(options, "table", TABLES)
    tables, not_covered = [], []
    for name in options.only or TABLES:
        table = make(name, results)
        if table.covered or options.all or options.only:
            columns = options.columns and column_indices(table, options.columns)
            tables.append(table.only(columns, ours=table.covered and not options.all))
        else:
            not_covered.append(name)
    if options.print:
        show("\n".join(map(markdown, tables)), end="")
        return 0
    folder = options.out or options.runs / "tables"
    save(tables, folder)
    names = ", ".join(table.name for table in tables)
    show(f"{folder}  {names or 'no table: no finished run has scores'}")
    if not_covered:
        show(f"not covered by these runs (--all writes them too): {', '.join(not_covered)}")
    return 0
