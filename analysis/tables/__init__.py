"""Every table, by name: `analysis.tables.make("route_placement", "runs")`.

Each builder takes a `Study` and returns a `Table` with our numbers (mean +- std, n) and the paper's
beside them.
"""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from analysis.runs.cells import Source, Study, study_for_command
from analysis.runs.run_records import AnalysisError, pick
from analysis.runs.seed_statistics import ENOUGH_SEEDS
from analysis.tables import ablations, equal_cost, guidance_table, main_table
from analysis.tables.render import PAGE_WIDTH, PREAMBLE, document, write
from analysis.tables.table import Table, markdown
from experiments.runtime.files import atomic_write

TABLES: dict[str, Callable[[Study], Table]] = {
    "speedup": equal_cost.headline,
    "main": main_table.main,
    "summary": main_table.summary,
    "steps": main_table.steps_and_cost,
    "treatments": main_table.treatments,
    "tails": main_table.tails,
    "sota": main_table.sota,
    "route_placement": lambda study: ablations.along(study, "route_placement"),
    "selection_rate": lambda study: ablations.along(study, "selection_rate"),
    "relative_absolute": lambda study: ablations.along(study, "relative_absolute"),
    "high_res": main_table.high_res,
    "text": main_table.text,
    "tokens": main_table.tokens,
    "one_two_routes": lambda study: ablations.along(study, "one_two_routes"),
    "masking": equal_cost.masking,
    "response": guidance_table.response,
    "guidance": guidance_table.guidance,
    "guidance_scale": lambda study: guidance_table.scale_table(guidance_table.stored_scales(study)),
    "throughput": equal_cost.throughput,
    "benchmark": equal_cost.benchmark,
    "scan_order": ablations.scan_order,
    "differences": main_table.differences,
    "all_scores": main_table.all_scores,
    "followups": main_table.followups,
}

__all__ = ["TABLES", "Table", "answer", "make", "make_all", "save"]


def make(name: str, source: Source, metric: str | None = None) -> Table:
    """Build one table.

    Args:
        name: One of `TABLES`.
        source: Runs folder, loaded runs or a study.
        metric: Full name of the metric; None takes each base's Frechet distance.

    Raises:
        AnalysisError: if there is no such table, runs folder or metric.
    """
    return pick("table", name, TABLES)(Study.of(source, metric))


def make_all(source: Source, metric: str | None = None) -> list[Table]:
    """Build every table; `Table.covered` says whether our runs give any of its numbers."""
    study = Study.of(source, metric)
    return [builder(study) for builder in TABLES.values()]


def answer(main: Table) -> Table:
    """Return our columns of the main table, and its rows with a difference of enough seeds."""
    own = [place for place, column in enumerate(main.columns) if not column.published]
    deltas = [i for i, column in enumerate(main.columns) if column.label.startswith("\u0394")]
    rows = [
        row
        for row in main.rows
        if any(row.entries[i].n is not None and not row.entries[i].few for i in deltas)
    ]
    left = len(main.only(ours=True).groups) - len({row.group for row in rows})
    more = f"Settings without a difference of {ENOUGH_SEEDS} seeds: {left}, in the main table."
    notes = (*([more] if left else []), *main.notes)
    return dataclasses.replace(main, name="answer", rows=tuple(rows), notes=notes).only(own)


def places(table: Table, names: Sequence[str]) -> list[int]:
    """Return the numbers of a table's first column and of those named by heading or number.

    `AnalysisError` if it has no such column.
    """
    labels = {column.label.casefold(): place for place, column in enumerate(table.columns)}
    labels |= {str(place): place for place in range(len(table.columns))}
    if unknown := [name for name in names if name.casefold() not in labels]:
        known = ", ".join(f"{i} {column.label!r}" for i, column in enumerate(table.columns))
        raise AnalysisError(f"table {table.name} has no column {unknown[0]!r}; it has {known}")
    return list(dict.fromkeys([0, *(labels[name.casefold()] for name in names)]))


def save(tables: list[Table], folder: str | Path, width: float = PAGE_WIDTH) -> list[Path]:
    """Write tables in all formats, `preamble.tex` and `tables.tex`, which compiles as it is."""
    paths = [path for table in tables for path in write(table, folder)]
    for name, text in (("preamble.tex", PREAMBLE), ("tables.tex", document(tables, width))):
        paths.append(Path(folder) / name)
        atomic_write(paths[-1], text)
    return paths


def command(options: argparse.Namespace) -> int:
    """Write the tables that runs give, or print them."""
    study = study_for_command(options)
    every = [make(name, study) for name in options.only or TABLES]
    made = []
    for table in every:
        if table.covered or options.all or options.only:
            columns = options.columns and places(table, options.columns)
            made.append(table.only(columns, table.covered and not options.all))
    if options.print:
        print("\n".join(markdown(table) for table in made), end="")
        return 0
    folder = options.out or options.runs / "tables"
    save(made, folder, options.width)
    names = [table.name for table in made]
    print(f"{folder}  {', '.join(names) or 'no table: no finished run has scores'}")
    if left := [table.name for table in every if table.name not in names]:
        print(f"not covered by these runs (--all writes them too): {', '.join(left)}")
    return 0
