"""The effective guidance scale: what `analysis.guidance_scale` stored beside runs, as a table."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.aggregation import mean_std
from analysis.errors import AnalysisError
from analysis.measured import read_beside
from analysis.results import Results
from analysis.run_files import Damaged, read_json
from analysis.tables.table import Column, Entry, RowValues, Table, build, measured
from backbones.parsing import is_number

FORMAT = "tread-suite-guidance-scale/1"
FILE = "guidance_scale.json"
#: sigma / alpha over the data's standard deviation: t / (1 - t) at t = .6, .7, .8, .9 and .95 of
#: flow matching, from where a class begins to show to almost noise.
LEVELS = (1.5, 7 / 3, 4.0, 9.0, 19.0)
FORMS = ("plain", "instrumented")
_LOSSES = ("loss_strong", "loss_weak", "square")
# Numbers of a row: both forms with their intervals, losses, and the squared difference.
NUMBERS = [f"{form}{end}" for form in FORMS for end in ("", "_low", "_high")] + [*_LOSSES]
_FIELDS = {
    "run": str, "backbone": str, "size": str, "data": str, "route": str, "notes": list, "rows": list
}  # fmt: skip
_HEADINGS = ("Plain", "Instrumented", "Loss, strong", "Loss, weak", "|d|\u00b2")
_NOTES = (
    "Class over null prediction of the dense pass (dense) and of the routed pass (routed), the "
    "dense over the routed pass, the same model over one of another seed (two seeds), and dense "
    "weights of nearly the run's held-out loss (equal loss); 1 is calibrated.",
    "An error of the strong prediction's own raises the plain form, to 2 where both are equally "
    "good: what is read as a scale is the instrumented form, and contrasts.",
    "Sigma: sigma / alpha over the data's standard deviation.",
)


def read_scales(path: Path) -> dict[str, Any]:
    """Read what was stored beside a run; raise `AnalysisError` where it is not such a file."""
    try:
        stored, reason = read_json(path), "other content"
    except Damaged as error:
        stored, reason = {}, str(error)
    if not _is_valid(stored):
        raise AnalysisError(
            f"{path} is not a {FORMAT} file ({reason}); make one with python -m analysis "
            "guidance-scale RUN"
        )
    return stored


def _is_valid(stored: dict[str, Any]) -> bool:
    if stored.get("format") != FORMAT:
        return False
    for key, kind in _FIELDS.items():
        if not isinstance(stored.get(key), kind):
            return False
    if not (is_number(stored.get("step")) and is_number(stored.get("seed"))):
        return False
    for row in stored["rows"]:
        if not isinstance(row, dict) or not isinstance(row.get("pair"), str):
            return False
        for name in ("level", *NUMBERS):
            if row.get(name) is not None and not is_number(row[name]):
                return False
    return True


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
        values = [_scale_entry(seeds, name, levels) for name in (*FORMS, *_LOSSES)]
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
