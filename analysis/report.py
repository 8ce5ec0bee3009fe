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

from analysis import figures, tables
from analysis.figures.convergence import picture
from analysis.publish import facts
from analysis.runs import compare
from analysis.runs.cells import Source, Study, study_for_command
from analysis.runs.run_records import AnalysisError
from analysis.runs.seed_statistics import ENOUGH_SEEDS
from analysis.tables.equal_cost import headline_cell
from analysis.tables.render import TEMPLATES, frame_csv, to_html
from analysis.tables.table import (
    Column,
    Table,
    Value,
    after,
    build,
    metric_decimals,
    metric_label,
    plain,
)
from experiments.runtime.console import Console
from experiments.runtime.files import atomic_write, check_replaceable

_MOST_GRIDS = 48
_FACTS = {"FLOPs": "macs", "steps": "step"}  # of a card, by cost


def write(
    source: Source, out: str | Path, title: str | None = None, say: Callable[[str], object] = str
) -> Path:
    """Write the report of runs to an HTML file; return its path.

    Without `title` the heading names the folder. `say` hears of each of the `STAGES` parts as it
    is done. `AnalysisError` if the folder is none.
    """
    path = Path(out)
    atomic_write(path, html(Study.of(source), title, say))
    return path


def html(study: Study, title: str | None = None, say: Callable[[str], object] = str) -> str:
    """Return the report as one HTML document."""
    made: dict[str, Table] = {}
    for name, builder in tables.TABLES.items():
        made[name] = builder(study)
        say(f"table {name}")
    drawn: dict[str, dict[str, Any]] = {}
    for name, draw in figures.FIGURES.items():
        if (plot := draw(study)) is not None:
            image = _uri(plot.svg().encode(), "image/svg+xml")
            about = {"name": plot.name, "title": plot.title, "caption": plot.caption}
            about |= {"image": image, "csv": _uri(frame_csv(plot.data).encode(), "text/csv")}
            drawn[name] = {**about, "width": round(plot.figure.get_figwidth() * 140)}
        say(f"figure {name}")
    folder = Path(__file__).with_name("templates")
    css, js = ((folder / f"report.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    cards, without = _headlines(study)
    answer = tables.answer(made["main"])
    # What compares the two kinds of runs at a glance, else whatever there is.
    first = next((name for name in ("overview", "convergence") if name in drawn), None)
    grids, more = _grids(study)
    attrs = study.runs.attrs
    known = {
        name: sorted({str(value) for value in study.runs.get(name, ()) if not pd.isna(value)})
        for name in ("backbone", "route", "scale", "data")
    }
    known["route"] = [route for route in known["route"] if route != "none"]
    varying = []
    for key, part in compare.varying(study.runs).groupby("key", sort=False):
        values = [f"{row.value} ({row.runs})" for row in part.itertuples()]
        more_values = f" and {len(values) - 12} more" if len(values) > 12 else ""
        varying.append((str(key), ",  ".join(values[:12]) + more_values))
    say("samples and runs")
    return TEMPLATES.get_template("report.html").render(
        title=title or f"Runs in {os.path.basename(os.path.abspath(attrs.get('root', 'runs')))}",
        css=Markup(css),
        js=Markup(js),
        css_hash=_hash(css),
        js_hash=_hash(js),
        runs=len(study.runs),
        unfinished=attrs.get("unfinished", []),
        damaged=attrs.get("damaged", []),
        known=known,
        answer=answer if answer.rows else None,
        answer_figure=drawn.pop(first) if first else None,
        cards=cards,
        without=without,
        figures=list(drawn.values()),
        tables=[table.only(ours=True) for table in made.values() if table.covered],
        published=[table for table in made.values() if not table.covered],
        grids=grids,
        more_grids=more,
        runs_table=runs_table(study),
        # What the whole page can be filtered by.
        picks={name.capitalize(): values for name, values in known.items() if len(values) > 1},
        varying=varying,
        common=sorted(compare.common(study.runs).items()),
        machines=facts(study) if len(study.runs) else [],
        enough=ENOUGH_SEEDS,
        html=lambda table: Markup(to_html(table)),
    )


# Parts of the work that `say` hears of.
STAGES = len(tables.TABLES) + len(figures.FIGURES) + 1


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _uri(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _headlines(study: Study) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a card per base whose speed-up enough seeds give, and why the others have none."""
    cards, without = [], []
    for base, dense, routed in study.pairs():
        speedups = headline_cell(base, dense, routed)
        factor, seeds = speedups["macs"], plain(speedups["seeds"])
        label = f"{base.label}: {routed.treatment}{after([dense, routed])}"
        if factor.value is None or factor.few:
            without.append(f"{label} ({seeds.partition(',')[0]} seeds reach it)")
            continue
        facts = [(text, plain(speedups[key])) for text, key in _FACTS.items()]
        about = {"backbone": base.backbone, "label": label}
        about["big"] = factor.number(factor.value) + factor.unit
        about["line"] = f"fewer training FLOPs to the dense run's best score (n={factor.seeds})"
        cards.append({**about, "facts": [*facts, ("metric", metric_label(base.metric))]})
    return cards, without


def runs_table(study: Study) -> Table:
    """Return the table of every finished run with its own scores and costs."""
    frame = study.runs
    metrics = [name for name in frame.attrs.get("metrics", {}) if f"score.{name}" in frame]
    text = ("run", "backbone", "size", "data", "scale", "route", "selection", "variant")
    labels = [*(name.capitalize() for name in text[:-1]), "Treatment"]
    columns = [
        *Column.each(*labels, numeric=False),
        *Column.each("Seed", "Steps", decimals=0),
        *(Column(metric_label(name), decimals=metric_decimals(name)) for name in metrics),
        Column("GMACs per image", decimals=4),
    ]
    rows: list[tuple[str, list[Value]]] = []
    for row in frame.to_dict("records"):
        macs = "macs_dense" if row.get("variant") == "dense" else "macs_routed"
        units = dict.fromkeys(["seed", "step", *(f"score.{name}" for name in metrics)], 1.0)
        units |= {macs: 1e9}
        known = {key: value for key, value in row.items() if not pd.isna(value)}
        numbers = [float(known[k]) / unit if k in known else None for k, unit in units.items()]
        rows.append(("", [*(str(known.get(key) or "") for key in text), *numbers]))
    return build("runs", "Every finished run", columns, rows)


def _grids(study: Study) -> tuple[list[dict[str, str]], int]:
    """Return a grid per treatment, of its lowest seed, re-encoded; and how many more there are."""
    found: list[dict[str, str]] = []
    more = 0
    for base, cell in ((one, cell) for one in study.bases for cell in one.cells):
        runs = [Path(str(path)) for path in cell.runs.sort_values("seed")["path"]]
        runs = [run for run in runs if (run / "samples" / "final.png").is_file()]
        shown = runs[:1] if len(found) < _MOST_GRIDS else []
        more += len(runs) - len(shown)
        for run in shown:
            if (image := picture(run)) is not None:
                stream = io.BytesIO()
                Image.fromarray(image).save(stream, format="PNG")
                about = {"run": run.name, "label": f"{base.label}: {cell.treatment}"}
                found.append({**about, "image": _uri(stream.getvalue(), "image/png")})
    return found, more


def command(options: argparse.Namespace) -> int:
    """Write the report of a folder of runs."""
    out = options.out or options.runs / "report.html"
    check_replaceable(out)
    with Console(stderr=True).progress("report", STAGES + 1) as bar:
        done = itertools.count(2)
        study = study_for_command(options)
        if study.runs.empty:
            raise AnalysisError(
                f"no finished run below {options.runs}; python -m analysis list {options.runs} "
                "says why"
            )
        bar.update(1, f"{len(study.runs)} runs read")
        path = write(study, out, options.title, lambda text: bar.update(next(done), text))
    print(f"{path}  {path.stat().st_size / 1e6:.1f} MB, {len(study.runs)} runs")
    return 0
