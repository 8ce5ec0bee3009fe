"""One self-contained HTML page that opens from disk: tables, figures, samples and runs.

Figures are embedded as SVG, sample grids as PNG, the style is inline, and a content security policy
forbids everything else. Every text from a run is escaped.
"""

import argparse
import base64
import os
from pathlib import Path

import pandas as pd
from markupsafe import Markup

from analysis import figures, tables
from analysis.comparison.results import Results, Source, results_for_command
from analysis.errors import AnalysisError
from analysis.reports.pages import machine_lines
from analysis.tables.render import TEMPLATES, frame_csv, to_html
from experiments.runtime.files import atomic_write, check_replaceable

_COLUMNS = [
    "run", "backbone", "size", "data", "scale", "route", "selection", "method", "seed", "step",
]  # fmt: skip
_MOST_GRIDS = 48
_MOST_VALUES = 12  # of one key that are listed


def write(source: Source, out: str | Path, title: str | None = None) -> Path:
    """Write the report of runs to an HTML file; return its path.

    Args:
        source: Runs folder, loaded runs or `Results`.
        out: The HTML file.
        title: Heading; None names the folder.

    Raises:
        AnalysisError: if the folder is none.
    """
    path = Path(out)
    atomic_write(path, html(Results.of(source), title))
    return path


def html(results: Results, title: str | None = None) -> str:
    """Return the report as one HTML document."""
    if title is None:
        root = results.roots[0] if results.roots else "runs"
        title = f"Runs in {os.path.basename(os.path.abspath(root))}"
    shown = []
    for table in tables.make_all(results):
        if table.covered:
            table = table.only(ours=True)
            shown.append((table, Markup(to_html(table))))
    plots = []
    for plot in figures.make_all(results):
        picture = _data_uri(plot.svg().encode(), "image/svg+xml")
        plots.append((plot, picture, _data_uri(frame_csv(plot.data).encode(), "text/csv")))
    varying, common = _configurations(results.runs)
    return TEMPLATES.get_template("report.html").render(
        title=title,
        count=len(results.runs),
        tables=shown,
        plots=plots,
        grids=_grids(results.runs),
        runs=_html(_runs(results)),
        varying=_html(varying),
        common=_html(common),
        machines=machine_lines(results.runs),
        problems=_html(results.problems.drop(columns=["path", "eta_s"], errors="ignore")),
    )


def _html(frame: pd.DataFrame) -> Markup:
    """Return a frame as an escaped HTML table; nothing without rows."""
    table = frame.to_html(index=False, na_rep="", border=0, float_format="{:.5g}".format)
    return Markup(table if len(frame) else "")


def _data_uri(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _grids(runs: pd.DataFrame) -> list[tuple[str, str]]:
    """Return the last sample grid of the lowest seed of each variant, with the run's name."""
    grids: list[tuple[str, str]] = []
    first = runs.sort_values("seed").drop_duplicates(["group", "variant"])
    for run, path in first.sort_index()[["run", "path"]].itertuples(index=False):
        picture = Path(path) / "samples" / "final.png"
        if picture.is_file() and len(grids) < _MOST_GRIDS:
            grids.append((run, _data_uri(picture.read_bytes(), "image/png")))
    return grids


def _runs(results: Results) -> pd.DataFrame:
    """Return every finished run with its own scores."""
    scores = [f"score.{name}" for name in results.metrics if f"score.{name}" in results.runs]
    return results.runs[[*_COLUMNS, *scores]].rename(
        columns=lambda name: name.removeprefix("score.")
    )


def _configurations(runs: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the keys that vary between runs, with the number of runs, and those that do not."""
    config = runs.filter(regex=r"^config\.(?!paths\.)").astype("string").fillna("null")
    rows = []
    for column in config:
        counts = config[column].value_counts()
        values = [f"{value} ({count})" for value, count in counts.head(_MOST_VALUES).items()]
        if len(counts) > _MOST_VALUES:
            values.append(f"and {len(counts) - _MOST_VALUES} more")
        text = ", ".join(values) if len(counts) > 1 else counts.index[0]
        rows.append((str(column).removeprefix("config."), text, len(counts) > 1))
    frame = pd.DataFrame(rows, columns=["key", "values (runs)", "varies"])
    varies = frame.pop("varies").astype(bool)
    return frame[varies], frame[~varies].rename(columns={"values (runs)": "value"})


def command(options: argparse.Namespace) -> int:
    """Write the report of a folder of runs."""
    out = options.out or options.runs / "report.html"
    check_replaceable(out)
    results = results_for_command(options)
    if results.runs.empty:
        raise AnalysisError(
            f"no finished run below {options.runs}; python -m analysis list {options.runs} says why"
        )
    path = write(results, out, options.title)
    print(f"{path}  {path.stat().st_size / 1e6:.1f} MB, {len(results.runs)} runs")
    return 0
