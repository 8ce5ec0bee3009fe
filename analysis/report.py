"""One self-contained HTML page that opens from disk, without server or network.

Figures are embedded as SVG, sample grids as PNG, style and script are inline; a content security
policy by hash forbids everything else. Tables sort and filter. Every string from a run is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from PIL import Image

from analysis import figures, tables
from analysis.figures.sample_grids import picture
from analysis.figures.style import Plot
from analysis.runs import compare
from analysis.runs.comparison_groups import Base
from analysis.runs.statistics import ENOUGH_SEEDS
from analysis.runs.study import Study
from analysis.tables.headings import after, difference, metric_decimals, score
from analysis.tables.memorisation import Memory
from analysis.tables.render import frame_csv, plain, to_html
from analysis.tables.speedup import headline_cell
from analysis.tables.table import Column, Entry, Table, build, words
from experiments.runtime.files import atomic_write
from routing.plain import json_of

TEMPLATES = Path(__file__).with_name("templates")
_MOST_GRIDS = 48
_PICKS = ("Backbone", "Route", "Data")


def write(
    source: Study | pd.DataFrame | str | Path, out: str | Path, title: str | None = None
) -> Path:
    """Write the report.

    Args:
        source: Runs folder, loaded runs or a study.
        out: The HTML file to write.
        title: Heading; None names the folder.

    Returns:
        The path written.

    Raises:
        AnalysisError: if the folder is none.
    """
    study = Study.of(source)
    path = Path(out)
    atomic_write(path, html(study, title))
    return path


def html(study: Study, title: str | None = None) -> str:
    """Return the report as one HTML document."""
    made = tables.make_all(study)
    drawn = figures.make_all(study)
    css, js = (
        (TEMPLATES / name).read_text(encoding="utf-8") for name in ("report.css", "report.js")
    )
    grids, more = _grids(study)
    attrs = study.runs.attrs
    shown = [_table(table) for table in made if table.covered]
    published = [_table(table) for table in made if not table.covered]
    context = {
        "title": title or f"Runs in {Path(attrs.get('root', 'runs')).name}",
        "css": Markup(css),
        "js": Markup(js),
        "css_hash": _hash(css),
        "js_hash": _hash(js),
        "runs": len(study.runs),
        "unfinished": attrs.get("unfinished", []),
        "damaged": attrs.get("damaged", []),
        "facts": _facts(study),
        "cards": [_card(study, base) for base in study.bases if base.dense and base.auto()],
        "figures": [_figure(plot) for plot in drawn],
        "tables": shown,
        "published": published,
        "grids": grids,
        "more_grids": more,
        "runs_table": Markup(to_html(runs_table(study))),
        "picks": _picks(study),
        "varying": _varying(study.runs),
        "common": sorted(compare.common(study.runs).items()),
        "machines": _machines(study.runs),
        "enough": ENOUGH_SEEDS,
    }
    context["sections"] = _sections(context)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=False)
    template = environment.from_string((TEMPLATES / "report.html").read_text(encoding="utf-8"))
    return template.render(context)


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _uri(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _sections(context: dict[str, Any]) -> list[tuple[str, str]]:
    sections = [("overview", "Overview"), ("figures", "Figures"), ("tables", "Tables")]
    sections += [("samples", "Samples")] if context["grids"] else []
    sections += [("runs", "Runs"), ("configs", "Configs")]
    sections += (
        [("problems", "Not in the tables")] if context["unfinished"] or context["damaged"] else []
    )
    return sections + ([("published", "Published")] if context["published"] else [])


def _facts(study: Study) -> list[str]:
    facts = []
    for column, what in (("backbone", "backbones"), ("data", "data"), ("scale", "scale")):
        if column in study.runs:
            values = sorted(set(study.runs[column].dropna()))
            facts.append(f"{what} {', '.join(map(str, values))}")
    return facts


def _card(study: Study, base: Base) -> dict[str, Any]:
    dense, routed = base.pair()
    assert dense is not None and routed is not None
    speedups = headline_cell(study, base, dense, routed)
    steps, macs, hours = (plain(speedups[key]) for key in ("step", "macs", "hours"))
    gap = difference(base, routed, dense)
    factor = speedups["macs"]
    if factor.value is None:
        big, what = macs, "the dense run's best score"
    elif factor.few:
        big = f"{factor.seeds} seeds" if factor.of != factor.n else f"n={factor.n}"
        what = "reached the dense run's best score: too few for a factor"
    else:
        big = factor.number(factor.value) + factor.unit
        what = f"fewer training FLOPs to the dense run's best score (n={factor.seeds})"
    return {
        "backbone": str(base.any.first("backbone")),
        "label": f"{base.label}: {routed.treatment}{after([dense, routed])}",
        "big": big,
        "line": what,
        "facts": [
            ("FLOPs", macs),
            ("steps", steps),
            ("hours", hours),
            ("dense", plain(score(base, dense))),
            ("routed", plain(score(base, routed))),
            ("difference", plain(gap)),
            *zip(
                ("memorisation, dense", "memorisation, routed"),
                map(plain, Memory.of(study).entries(base, dense, routed)),
                strict=False,
            ),
            ("metric", base.metric),
        ],
    }


def _figure(plot: Plot) -> dict[str, Any]:
    return {
        "name": plot.name,
        "title": plot.title,
        "caption": plot.caption,
        "image": _uri(plot.svg().encode(), "image/svg+xml"),
        "csv": _uri(frame_csv(plot.data).encode(), "text/csv"),
        "width": round(plot.figure.get_figwidth() * 110),
    }


def _table(table: Table) -> dict[str, Any]:
    return {
        "name": table.name,
        "title": table.title,
        "notes": table.notes,
        "html": Markup(to_html(table)),
    }


def runs_table(study: Study) -> Table:
    """Return the table of every finished run with its own scores and costs."""
    frame = study.runs
    metrics = [name for name in frame.attrs.get("metrics", {}) if f"score.{name}" in frame]
    text = {
        "Run": "run",
        "Backbone": "backbone",
        "Size": "size",
        "Data": "data",
        "Route": "route",
        "Selection": "selection",
        "Treatment": "variant",
    }
    columns = [Column(label, numeric=False) for label in text]
    columns += [Column("Seed"), Column("Steps"), *(Column(name) for name in metrics)]
    columns += [Column("Images/s"), Column("Hours"), Column("GMACs per image")]
    rows = []
    for row in frame.to_dict("records"):
        entries = [words("" if pd.isna(row.get(key)) else row.get(key)) for key in text.values()]
        entries += [_number(row.get("seed"), 0), _number(row.get("step"), 0)]
        entries += [_number(row.get(f"score.{name}"), metric_decimals(name)) for name in metrics]
        macs = row.get("macs_dense") if row.get("variant") == "dense" else row.get("macs_routed")
        entries += [
            _number(row.get("throughput"), 1),
            _number(row.get("wall_s"), 3, 3600),
            _number(macs, 4, 1e9),
        ]
        rows.append(("", entries))
    return build("runs", "Every finished run", columns, rows)


def _number(value: Any, decimals: int, divide: float = 1.0) -> Entry:
    if value is None or pd.isna(value):
        return words("missing")
    return Entry(value=float(value) / divide, decimals=decimals)


def _picks(study: Study) -> list[dict[str, Any]]:
    labels = [column.label for column in runs_table(study).columns]
    picks = []
    for label in _PICKS:
        options = (
            sorted(map(str, set(study.runs[label.lower()].dropna())))
            if label.lower() in study.runs
            else []
        )
        if len(options) > 1:
            picks.append({"column": labels.index(label), "label": label, "options": options})
    return picks


def _varying(frame: pd.DataFrame) -> list[tuple[str, str]]:
    found = compare.varying(frame)
    result = []
    for key, part in found.groupby("key", sort=False):
        values = [
            f"{value} ({count})" for value, count in zip(part["value"], part["runs"], strict=True)
        ]
        more = f" and {len(values) - 12} more" if len(values) > 12 else ""
        result.append((str(key), ",  ".join(values[:12]) + more))
    return result


def _machines(frame: pd.DataFrame) -> list[tuple[str, int]]:
    counts: dict[str, int] = {}
    for path in frame.get("path", []):
        try:
            about = json_of((Path(str(path)) / "env.json").read_bytes())
            packages = about.get("packages") or {}
            parts = [
                about.get("device"),
                f"torch {packages.get('torch')}",
                f"python {about.get('python')}",
                about.get("git"),
            ]
            text = ", ".join(str(part) for part in parts if part)
        except (OSError, ValueError, AttributeError):
            text = "not recorded"
        counts[text] = counts.get(text, 0) + 1
    return sorted(counts.items())


def _grids(study: Study) -> tuple[list[dict[str, str]], int]:
    """One grid per treatment (its lowest seed), the rest counted.

    Pictures are re-encoded, never copied.
    """
    found: list[dict[str, str]] = []
    more = 0
    for base in study.bases:
        for cell in base.cells:
            with_picture = 0
            for row in cell.runs.sort_values("seed").to_dict("records"):
                if not (Path(str(row["path"])) / "samples" / "final.png").is_file():
                    continue
                with_picture += 1
                if with_picture == 1 and len(found) < _MOST_GRIDS:
                    image = picture(str(row["path"]))
                    if image is not None:
                        found.append(
                            {"run": str(row["run"]), "image": _uri(_png(image), "image/png")}
                        )
                else:
                    more += 1
    return found, more


def _png(image: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, format="PNG", optimize=True)
    return stream.getvalue()
