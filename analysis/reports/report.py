"""One self-contained HTML page that opens from disk, without server or network.

It opens on the answer: the main table and one figure. Figures are embedded as SVG, sample grids as
PNG, style and script are inline; a content security policy by hash forbids everything else. Tables
sort, and the page filters by backbone, route and scale. Every string from a run is escaped.
"""

import argparse
import base64
import hashlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from markupsafe import Markup

from analysis import figures, tables
from analysis.comparison.aggregation import ENOUGH_SEEDS
from analysis.comparison.results import Results, Source, results_for_command
from analysis.errors import AnalysisError
from analysis.reports import report_sections as sections
from analysis.reports.machines import machine_lines
from analysis.tables.render import TEMPLATES, frame_csv, to_html
from experiments.runtime.console import Console
from experiments.runtime.files import atomic_write, check_replaceable

# Parts of the work whose completion is reported.
STAGES = len(tables.TABLES) + len(figures.FIGURES) + 1


def _ignore(text: str) -> None:
    """Report nothing on the way."""


def write(
    source: Source,
    out: str | Path,
    title: str | None = None,
    progress: Callable[[str], object] = _ignore,
) -> Path:
    """Write the report of runs to an HTML file; return its path.

    Args:
        source: Runs folder, loaded runs or `Results`.
        out: The HTML file.
        title: Heading; None names the folder.
        progress: Called with the name of each of the `STAGES` parts when it is done.

    Raises:
        AnalysisError: if the folder is none.
    """
    path = Path(out)
    atomic_write(path, html(Results.of(source), title, progress))
    return path


def html(
    results: Results, title: str | None = None, progress: Callable[[str], object] = _ignore
) -> str:
    """Return the report as one HTML document."""
    all_tables: dict[str, tables.Table] = {}
    for name in tables.TABLES:
        all_tables[name] = tables.make(name, results)
        progress(f"table {name}")
    plots = {}
    for name, draw in figures.FIGURES.items():
        plot = draw(results)
        if plot is not None:
            plots[name] = _figure(plot)
        progress(f"figure {name}")
    values = _page_values(results)
    values |= _tables_and_figures(all_tables, plots)
    progress("samples and runs")
    if title is None:
        root = results.roots[0] if results.roots else "runs"
        title = f"Runs in {os.path.basename(os.path.abspath(root))}"
    return TEMPLATES.get_template("report.html").render(
        title=title, enough=ENOUGH_SEEDS, html=lambda table: Markup(to_html(table)), **values
    )


def _tables_and_figures(
    all_tables: dict[str, tables.Table], plots: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Return the template's values of tables and figures, the answer apart."""
    answer = tables.answer(all_tables["main"])
    covered, published = [], []
    for table in all_tables.values():
        if table.covered:
            covered.append(table.only(ours=True))
        else:
            published.append(table)
    # The figure that compares the two kinds of runs at a glance.
    answer_figure = plots.pop("overview", None) or plots.pop("convergence", None)
    return {
        "answer": answer if answer.rows else None,
        "answer_figure": answer_figure,
        "figures": list(plots.values()),
        "tables": covered,
        "published": published,
    }


def _figure(plot: figures.Plot) -> dict[str, Any]:
    return {
        "name": plot.name,
        "title": plot.title,
        "caption": plot.caption,
        "image": sections.data_uri(plot.svg().encode(), "image/svg+xml"),
        "csv": sections.data_uri(frame_csv(plot.data).encode(), "text/csv"),
        "width": round(plot.figure.get_figwidth() * 140),
    }


def _page_values(results: Results) -> dict[str, Any]:
    """Return the template's values of runs, configurations and samples, and of the page itself."""
    folder = Path(__file__).parents[1] / "templates"
    css = (folder / "report.css").read_text(encoding="utf-8")
    js = (folder / "report.js").read_text(encoding="utf-8")
    cards, without = sections.cards(results)
    grids, more_grids = sections.grids(results)
    runs, problems = results.runs, results.problems
    damaged: list[dict[Any, Any]] = []
    unfinished: list[dict[Any, Any]] = []
    for row in problems.astype(object).where(problems.notna(), None).to_dict("records"):
        (damaged if row["status"] == "damaged" else unfinished).append(row)
    choices = sections.choices(runs)
    varying, common = sections.configurations(runs)
    picks = {}
    for name, values in choices.items():
        if len(values) > 1:
            picks[name.capitalize()] = values
    return {
        "css": Markup(css),
        "js": Markup(js),
        "css_hash": _hash(css),
        "js_hash": _hash(js),
        "runs": len(runs),
        "unfinished": unfinished,
        "damaged": damaged,
        "known": choices,
        "picks": picks,  # what the whole page can be filtered by
        "cards": cards,
        "without": without,
        "grids": grids,
        "more_grids": more_grids,
        "runs_table": sections.runs_table(results),
        "varying": varying,
        "common": common,
        "machines": machine_lines(runs),
    }


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def command(options: argparse.Namespace) -> int:
    """Write the report of a folder of runs."""
    out = options.out or options.runs / "report.html"
    check_replaceable(out)
    with Console(stderr=True).progress("report", STAGES + 1) as bar:
        results = results_for_command(options)
        if results.runs.empty:
            raise AnalysisError(
                f"no finished run below {options.runs}; python -m analysis list {options.runs} "
                "says why"
            )
        bar.update(1, f"{len(results.runs)} runs read")
        stages = itertools.count(2)
        path = write(results, out, options.title, lambda text: bar.update(next(stages), text))
    print(f"{path}  {path.stat().st_size / 1e6:.1f} MB, {len(results.runs)} runs")
    return 0
