"""One self-contained HTML page that opens from disk, without server or network.

It opens on the answer: the main table and one figure. Figures are embedded as SVG, sample grids as
PNG, style and script are inline; a content security policy by hash forbids everything else. Tables
sort, and the page filters by backbone, route and scale. Every string from a run is escaped.
"""

import argparse
import base64
import hashlib
import io
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup
from PIL import Image

from analysis import compare, figures, tables
from analysis.aggregation import ENOUGH_SEEDS
from analysis.errors import AnalysisError
from analysis.figures.sample_grids import picture
from analysis.groups import Group, Variant
from analysis.machines import machine_lines
from analysis.results import Results, Source, results_for_command
from analysis.tables import entries
from analysis.tables.render import TEMPLATES, frame_csv, to_html
from analysis.tables.speedup import headline_entries
from analysis.tables.table import Column, RowValues, Table, Value, build, plain
from experiments.runtime.console import Console
from experiments.runtime.files import atomic_write, check_replaceable

_MOST_GRIDS = 48
_MOST_VALUES = 12  # of one key that are listed
# Parts of the work that are reported on the way.
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
    all_tables: dict[str, Table] = {}
    for name, build_table in tables.TABLES.items():
        all_tables[name] = build_table(results)
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
    all_tables: dict[str, Table], plots: dict[str, dict[str, Any]]
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
        "image": _uri(plot.svg().encode(), "image/svg+xml"),
        "csv": _uri(frame_csv(plot.data).encode(), "text/csv"),
        "width": round(plot.figure.get_figwidth() * 140),
    }


def _page_values(results: Results) -> dict[str, Any]:
    """Return the template's values of runs, configurations and samples, and of the page itself."""
    folder = Path(__file__).with_name("templates")
    css = (folder / "report.css").read_text(encoding="utf-8")
    js = (folder / "report.js").read_text(encoding="utf-8")
    cards, without = _cards(results)
    grids, more_grids = _grids(results)
    runs, problems = results.runs, results.problems
    damaged: list[dict[Any, Any]] = []
    unfinished: list[dict[Any, Any]] = []
    for row in problems.astype(object).where(problems.notna(), None).to_dict("records"):
        (damaged if row["status"] == "damaged" else unfinished).append(row)
    choices = _choices(runs)
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
        "runs_table": runs_table(results),
        "varying": _varying(runs),
        "common": sorted(compare.common(runs).items()),
        "machines": machine_lines(runs) if len(runs) else [],
    }


def _choices(runs: pd.DataFrame) -> dict[str, list[str]]:
    """Return the values of the columns that the page can be filtered by."""
    choices = {}
    for name in ("backbone", "route", "scale", "data"):
        values = set(runs[name].dropna().map(str)) if name in runs else set()
        if name == "route":
            values.discard("none")
        choices[name] = sorted(values)
    return choices


def _varying(runs: pd.DataFrame) -> list[tuple[str, str]]:
    """Return the keys that vary between runs with their values, as text."""
    keys = []
    for key, part in compare.varying(runs).groupby("key", sort=False):
        values = [f"{row.value} ({row.runs})" for row in part.itertuples()]
        text = ",  ".join(values[:_MOST_VALUES])
        if len(values) > _MOST_VALUES:
            text += f" and {len(values) - _MOST_VALUES} more"
        keys.append((str(key), text))
    return keys


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _uri(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _cards(results: Results) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a card per group whose speed-up enough seeds give, and why the others have none."""
    cards, without = [], []
    for group, dense, routed in results.pairs():
        speedups = headline_entries(group, dense, routed)
        factor = speedups["macs"]
        label = f"{group.label}: {routed.name}{entries.after([dense, routed])}"
        if factor.value is None or factor.few:
            seeds = plain(speedups["seeds"]).partition(",")[0]
            without.append(f"{label} ({seeds} seeds reach it)")
            continue
        facts = [("FLOPs", plain(factor)), ("steps", plain(speedups["step"]))]
        facts.append(("metric", entries.metric_label(group.metric)))
        line = f"fewer training FLOPs to the dense run's best score (n={factor.seeds})"
        card = {"backbone": group.backbone, "label": label, "line": line, "facts": facts}
        cards.append({**card, "big": factor.number(factor.value) + factor.unit})
    return cards, without


def runs_table(results: Results) -> Table:
    """Return the table of every finished run with its own scores and costs."""
    texts = ("run", "backbone", "size", "data", "scale", "route", "selection", "method")
    metrics = [name for name in results.metrics if f"score.{name}" in results.runs]
    columns = list(Column.each(*(name.capitalize() for name in texts), numeric=False))
    columns += Column.each("Seed", "Steps", decimals=0)
    for name in metrics:
        columns.append(Column(entries.metric_label(name), decimals=entries.metric_decimals(name)))
    columns.append(Column("GMACs per image", decimals=4))
    numbers = ("seed", "step", *(f"score.{name}" for name in metrics))
    rows: list[RowValues] = []
    for row in results.runs.to_dict("records"):
        values: list[Value] = []
        for key in texts:
            values.append("" if pd.isna(row.get(key)) else str(row[key]))
        for key in numbers:
            values.append(None if pd.isna(row.get(key)) else float(row[key]))
        macs = row.get("macs_dense" if row.get("method") == "dense" else "macs_routed")
        values.append(None if pd.isna(macs) else float(macs) / 1e9)
        rows.append(("", values))
    return build("runs", "Every finished run", columns, rows)


def _grids(results: Results) -> tuple[list[dict[str, str]], int]:
    """Return a grid per variant, of its lowest seed, re-encoded; and how many more there are."""
    grids: list[dict[str, str]] = []
    more = 0
    for group in results.groups:
        for variant in group.variants:
            paths = _runs_with_samples(variant)
            more += len(paths)
            if paths and len(grids) < _MOST_GRIDS:
                more -= 1
                grids += _grid(group, variant, paths[0])
    return grids, more


def _runs_with_samples(variant: Variant) -> list[Path]:
    paths = map(Path, map(str, variant.runs.sort_values("seed")["path"]))
    return [path for path in paths if (path / "samples" / "final.png").is_file()]


def _grid(group: Group, variant: Variant, run: Path) -> list[dict[str, str]]:
    """Return a run's sample grid for the page; nothing where it cannot be read."""
    image = picture(run)
    if image is None:
        return []
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, format="PNG")
    uri = _uri(stream.getvalue(), "image/png")
    return [{"run": run.name, "label": f"{group.label}: {variant.name}", "image": uri}]


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
