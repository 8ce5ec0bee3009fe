"""The effective guidance scale: what `analysis.guidance_scale` stored beside runs, as a table."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.runs.cells import Study
from analysis.runs.run_files import Damaged, read_json
from analysis.runs.run_records import AnalysisError
from analysis.runs.statistics import mean_std
from analysis.runs.weights import read_beside
from analysis.tables.table import Column, Entry, Table, build, not_run, ours, words
from routing.parsing import is_number

FORMAT = "tread-suite-guidance-scale/1"
NAME = "guidance_scale.json"
#: sigma / alpha over the data's standard deviation: t / (1 - t) at t = .6, .7, .8, .9 and .95 of
#: flow matching, from where a class begins to show to almost noise.
LEVELS = (1.5, 7 / 3, 4.0, 9.0, 19.0)
FORMS = ("plain", "instrumented")
_TEXTS = ("run", "backbone", "size", "data", "route")
_COLUMNS = (*FORMS, "loss_strong", "loss_weak", "square")
_HEADINGS = ("Plain", "Instrumented", "Loss, strong", "Loss, weak", "|d|\u00b2")
_NOTES = (
    "Class over null prediction of the dense pass (dense) and of the routed pass (routed), the "
    "dense over the routed pass, the same model over one of another seed (two seeds), and dense "
    "weights of nearly the run's held-out loss (equal loss); 1 is calibrated.",
    "An error of the strong prediction's own raises the plain form, to 2 where both are equally "
    "good: what is read as a scale is the instrumented form, and contrasts.",
    "Sigma: sigma / alpha over the data's standard deviation.",
)


def read(path: Path) -> dict[str, Any]:
    """Read what was stored beside a run.

    Raises:
        AnalysisError: If it is not such a file.
    """
    try:
        found = read_json(path)
    except Damaged as error:
        found = {"reason": str(error)}
    rows, ends = found.get("rows"), [f"{form}_{end}" for form in FORMS for end in ("low", "high")]
    if (
        found.get("format") != FORMAT
        or not all(isinstance(found.get(key), str) for key in _TEXTS)
        or not all(is_number(found.get(key)) for key in ("step", "seed"))
        or not all(isinstance(found.get(key), list) for key in ("notes", "rows"))
        or not all(isinstance(row, dict) and isinstance(row.get("pair"), str) for row in rows or ())
        or not all(
            row.get(key) is None or is_number(row[key])
            for row in rows or ()
            for key in ("level", *_COLUMNS, *ends)
        )
    ):
        raise AnalysisError(
            f"{path} is not a {FORMAT} file ({found.get('reason', 'other content')}); make one "
            "with python -m analysis guidance-scale RUN"
        )
    return found


def stored(study: Study) -> list[dict[str, Any]]:
    """Return what was stored beside the runs of a study; a broken file is named and left out.

    Each has what tells its runs' setting from others of that model and data, as `apart`.
    """
    if study.runs.empty:
        return []
    columns = (study.named[name].map(str) for name in ("path", "setting"))
    settings = dict(zip(*columns, strict=True))

    def apart(path: Path) -> dict[str, Any]:
        _, bracket, more = settings.get(str(path.parent), "").partition(" (")
        return {**read(path), "apart": bracket + more}

    return read_beside(study.runs, NAME, apart)


def recipe(found: dict[str, Any]) -> str:
    """Return model, data and what tells their settings apart."""
    return f"{found['backbone']}-{found['size']}, {found['data']}{found.get('apart', '')}"


def label(found: dict[str, Any]) -> str:
    """Return what the seeds of one setting share: its recipe, route and steps."""
    route = "dense" if found["route"] == "none" else f"route {found['route']}"
    return f"{recipe(found)}, {route}, after {found['step']:.0f} steps"


def table(files: Sequence[dict[str, Any]], levels: bool = False) -> Table:
    """Return the scales by setting and pair.

    Seeds of one setting are averaged, one alone has its bootstrap interval; `levels` gives a row
    per noise level beside that of their mean, and what was said of each run.
    """
    columns = (*Column.each("Strong over weak", "Sigma", numeric=False), *Column.each(*_HEADINGS))
    groups: dict[tuple[str, str, float | None], list[dict[str, Any]]] = {}
    seeds = Counter((label(found), found["seed"]) for found in files)
    for found in files:
        heading = label(found)
        if seeds[heading, found["seed"]] > 1:  # no second seed: who knows what tells them apart
            heading += f": {found['run']}"
        for row in found["rows"]:
            if levels or row.get("level") is None:
                groups.setdefault((heading, row["pair"], row.get("level")), []).append(row)
    rows = []
    for (heading, pair, level), same in groups.items():
        names = [words(pair), words("mean" if level is None else f"{level:.3g}")]
        rows.append((heading, names + [_entry(same, name, levels) for name in _COLUMNS]))
    said = dict.fromkeys(note for found in files for note in found["notes"] if levels)
    title = "Effective guidance scale"
    return build(
        "guidance_scale", title, columns, rows or [not_run(columns)], (*map(str, said), *_NOTES)
    )


def _entry(rows: list[dict[str, Any]], name: str, one: bool) -> Entry:
    known = [row[name] for row in rows if row.get(name) is not None]
    if not known:
        # A contrast has no loss, and without an instrument there is no instrumented form.
        return words("undefined" if any(name in row for row in rows) else "")
    decimals = 3 if name in FORMS else 5
    if len(rows) > 1:
        return dataclasses.replace(ours(mean_std(known), decimals), of=len(rows))
    low, high = (rows[0].get(f"{name}_{end}") for end in ("low", "high"))
    return Entry("", known[0], None, low, high, None if one else 1, decimals=decimals)
