"""Parts of the report page beside tables and figures: cards, samples, runs and configurations."""

import base64
import io
from pathlib import Path
from typing import Any

import pandas as pd
from PIL import Image

from analysis.comparison.groups import Group, Variant
from analysis.comparison.results import Results
from analysis.figures.sample_grids import picture
from analysis.tables import entries
from analysis.tables.speedup import headline_entries
from analysis.tables.table import Column, RowValues, Table, Value, build, plain

_MOST_GRIDS = 48
_MOST_VALUES = 12  # of one key that are listed


def choices(runs: pd.DataFrame) -> dict[str, list[str]]:
    """Return the values of the columns that the page can be filtered by."""
    choices = {}
    for name in ("backbone", "route", "scale", "data"):
        values = set(runs[name].dropna().map(str)) if name in runs else set()
        if name == "route":
            values.discard("none")
        choices[name] = sorted(values)
    return choices


def configurations(runs: pd.DataFrame) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return the keys that vary between runs with their values, as text, and those that do not."""
    config = runs.filter(regex=r"^config\.(?!paths\.)").astype("string").fillna("null")
    varying, common = [], []
    for column in map(str, config):
        key = column.removeprefix("config.")
        counts = config[column].value_counts()
        if len(counts) == 1:
            common.append((key, str(counts.index[0])))
            continue
        values = [f"{value} ({count})" for value, count in counts.items()]
        text = ",  ".join(values[:_MOST_VALUES])
        if len(values) > _MOST_VALUES:
            text += f" and {len(values) - _MOST_VALUES} more"
        varying.append((key, text))
    return varying, sorted(common)


def cards(results: Results) -> tuple[list[dict[str, Any]], list[str]]:
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


def grids(results: Results) -> tuple[list[dict[str, str]], int]:
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
    uri = data_uri(stream.getvalue(), "image/png")
    return [{"run": run.name, "label": f"{group.label}: {variant.name}", "image": uri}]


def data_uri(content: bytes, kind: str) -> str:
    """Return content as a `data:` URI."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
