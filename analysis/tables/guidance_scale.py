"""The effective guidance scales that are stored beside runs, as a table."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.comparison.aggregation import mean_std
from analysis.comparison.results import Results
from analysis.measurements.guidance_scale_file import FILE, FORMS, LOSSES, NUMBERS, read_scales
from analysis.measurements.measured import read_beside
from analysis.tables.table import Column, Entry, RowValues, Table, build, measured

_HEADINGS = ("Plain", "Instrumented", "Loss, strong", "Loss, weak", "|d|\u00b2")
_NOTES = (
    "Class over null prediction of the dense pass (dense) and of the routed pass (routed), the "
    "dense over the routed pass, the same model over one of another seed (two seeds), and dense "
    "weights of nearly the run's held-out loss (equal loss); 1 is calibrated.",
    "An error of the strong prediction's own raises the plain form, to 2 where both are equally "
    "good: what is read as a scale is the instrumented form, and contrasts.",
    "Sigma: sigma / alpha over the data's standard deviation.",
)


def stored_scales(results: Results) -> list[dict[str, Any]]:
    """Return what was stored beside the runs; a broken file is left out with a warning.

    `details` is what distinguishes a run's group from others of that model and data, and `route`
    the variant of a routed run: one route with two selections is two variants.
    """
    runs = results.runs
    if runs.empty:
        return []
    labels = runs.set_index("path")[["group", "variant"]]

    def read(path: Path) -> dict[str, Any]:
        stored = read_scales(path)
        group, variant = labels.loc[str(path.parent)]
        _, bracket, details = str(group).partition(" (")
        route = "none" if stored["route"] == "none" else variant
        return {**stored, "details": bracket + details, "route": route}

    return read_beside(runs["path"], FILE, read)


def guidance_scale(results: Results) -> Table:
    """Return the table of the scales that were stored beside the runs."""
    return scale_table(stored_scales(results))


def scale_rows(files: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Return the rows of stored scales with what each run is.

    `config` is model, data and what distinguishes their groups; `setting` adds route and steps,
    which the seeds of one setting share. Two runs of one setting and seed have their run's name,
    too.
    """
    columns = ("run", "backbone", "data", "route", "seed", "step", "config", "setting")
    runs = []
    for stored in files:
        config = f"{stored['backbone']}-{stored['size']}, {stored['data']}"
        config += stored.get("details", "")
        tokens = "dense" if stored["route"] == "none" else f"route {stored['route']}"
        setting = f"{config}, {tokens}, after {stored['step']:.0f} steps"
        runs.append({**stored, "config": config, "setting": setting})
    table = pd.DataFrame(runs, columns=columns)
    repeated = table.duplicated(["setting", "seed"], keep=False)
    table.loc[repeated, "setting"] += ": " + table["run"]
    rows = []
    for run, stored in zip(table.to_dict("records"), files, strict=True):
        for row in stored["rows"]:
            rows.append({**run, **row})
    order = ["setting", *columns[:6], "pair", "level", *NUMBERS, "config"]
    return pd.DataFrame(rows).reindex(columns=order)


def scale_table(files: Sequence[dict[str, Any]], levels: bool = False) -> Table:
    """Return the scales by setting and pair.

    Seeds of one setting are averaged, one alone has its bootstrap interval; `levels` gives a row
    per noise level beside that of their mean, and the notes of each run.
    """
    columns = (*Column.each("Strong over weak", "Sigma", numeric=False), *Column.each(*_HEADINGS))
    stored_rows, notes = [], dict[str, None]()
    for stored in files:
        stored_rows += stored["rows"]
        if levels:
            notes.update(dict.fromkeys(map(str, stored["notes"])))
    same_setting: dict[tuple[str, str, float | None], list[dict[str, Any]]] = {}
    for setting, row in zip(scale_rows(files)["setting"], stored_rows, strict=True):
        if levels or row.get("level") is None:
            key = setting, row["pair"], row.get("level")
            same_setting.setdefault(key, []).append(row)
    rows: list[RowValues] = []
    for (setting, pair, level), seeds in same_setting.items():
        values = [_scale_entry(seeds, name, levels) for name in (*FORMS, *LOSSES)]
        rows.append((setting, [pair, "mean" if level is None else f"{level:.3g}", *values]))
    title = "Effective guidance scale"
    return build("guidance_scale", title, columns, rows, (*notes, *_NOTES))


def _scale_entry(rows: list[dict[str, Any]], name: str, single_run: bool) -> Entry:
    numbers = [row[name] for row in rows if row.get(name) is not None]
    if not numbers:
        # Contrasts have no loss; without an instrument there is no instrumented form.
        return Entry("undefined" if any(name in row for row in rows) else "")
    decimals = 3 if name in FORMS else 5
    if len(rows) > 1:
        return dataclasses.replace(measured(mean_std(numbers), decimals), of=len(rows))
    low, high = rows[0].get(f"{name}_low"), rows[0].get(f"{name}_high")
    n = None if single_run else 1
    return Entry("", numbers[0], None, low, high, n, decimals=decimals)
