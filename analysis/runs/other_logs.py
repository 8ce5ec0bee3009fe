"""Runs of other trainers, as they log: W&B exports and offline folders, TensorBoard event files.

Their configuration stands in what they logged or in a file `run.yaml` beside it, in this suite's
keys: `{backbone: dit, size: B/2, data: latents, route: none, seed: 0, train.batch: 256}`, and in
`columns` which of their names means what: `{loss: train/mse, "FID-50K (inception-adm)": fid}`.
Nothing is unpickled.
"""

import dataclasses
import io
import re
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.runs.run_files import Damaged, leaves, read_json, read_lines, read_yaml, shown
from experiments.config.schema import Config
from experiments.options.evaluation import METRICS
from experiments.runtime.parsing import bytes_of, is_number, json_of

_EVENTS, _CHART = "events.out.tfevents.", "wandb_export_"
_TABLE = re.compile(rf"history\.(csv|jsonl?)|{_CHART}.*\.csv")
_LOGS = re.compile(rf"{_TABLE.pattern}|{re.escape(_EVENTS)}.*|.*\.wandb")
_DESCRIPTION, _SUMMARY = "run.yaml", "files/wandb-summary.json"
# In this order; what stands later wins.
_CONFIGS = (
    "hparams.yml", "hparams.yaml", "files/config.yaml", "config.yaml", "config.json", _DESCRIPTION,
)  # fmt: skip
_NEEDED = {"backbone": "dit", "size": "B/2", "data": "latents", "seed": "0"}  # with an example
# What others call the columns of metrics.jsonl.
_USUAL = {
    "step": ("_step", "Step", "global_step", "trainer/global_step"),
    "time": ("_runtime", "Relative Time (Process)"),
    "loss": ("train/loss", "train_loss", "loss/train", "training_loss"),
}
_BETTER = {m.label: m.better for m in METRICS.values()} | {"FID": "lower", "KID": "lower"}
# A score's full name, as runs of this suite give it to a tracker: FID-50K (inception-adm).
_SCORE = re.compile(rf"({'|'.join(map(re.escape, _BETTER))})\S*-\d")


def is_other(names: set[str]) -> bool:
    """Return whether a folder with these entries holds another trainer's logs."""
    own = {"summary.json", "status.json", "metrics.jsonl"}
    return own.isdisjoint(names) and any(map(_LOGS.fullmatch, names))


def read_row(folder: Path) -> dict[str, Any]:
    """Return a run's columns by name, as `run_records.read_run` does.

    Where too little is known of its configuration, `Damaged` says what to add.
    """
    found = _configs(folder)
    own = {field.name for field in dataclasses.fields(Config)}  # other keys mean nothing here
    config = {key: v for key, v in leaves(found).items() if key.split(".")[0] in own}
    for group in ("backbone", "data", "objective"):
        config[f"{group}.name"] = config.pop(group, config.get(f"{group}.name"))
    config["objective.name"] = config["objective.name"] or "unknown"
    row: dict[str, Any] = {f"config.{key}": value for key, value in config.items()}
    row |= {group: config[f"{group}.name"] for group in ("backbone", "data")}
    row |= {"size": config.get("size"), "seed": config.get("seed")}
    by = "TensorBoard" if any(folder.glob(f"{_EVENTS}*")) else "W&B"
    row["config.trainer"] = trainer = str(found.get("trainer", by))
    # Headings name the scale: of another trainer it is whose run it is.
    row |= {"route": config.get("route", "none"), "scale": config.get("scale", f"of {trainer}")}
    if missing := {key: text for key, text in _NEEDED.items() if row[key] is None}:
        asked = ", ".join(f"{key}: {text}" for key, text in missing.items())
        raise Damaged(
            f"its configuration has no {', '.join(missing)}; say it in "
            f"{shown(folder / _DESCRIPTION)}, such as {{{asked}}}"
        )
    lines = records(folder, "metrics.jsonl")
    if not lines:
        raise Damaged("its logs hold no numbers by step")
    return row | {"status": "done", "step": lines[-1]["step"], "wall_s": lines[-1].get("time")}


def _configs(folder: Path) -> dict[str, Any]:
    """Return what is said of the configuration, in any keys."""
    found: dict[str, Any] = {}
    for path in (folder / name for name in _CONFIGS):
        for key, value in (read_yaml(path) if path.is_file() else {}).items():
            # W&B writes {key: {desc: ..., value: ...}}.
            wrapped = isinstance(value, dict) and "value" in value
            found[str(key)] = value["value"] if wrapped else value
    return found


def records(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return a run's metrics.jsonl or scores.jsonl, or what other logs say in it; or `Damaged`."""
    entries = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set[str]()
    if not is_other(entries):
        return read_lines(folder / name)
    asked = _configs(folder).get("columns") or {}
    if not isinstance(asked, dict) or not all(isinstance(v, str) for v in asked.values()):
        raise Damaged(f"{_DESCRIPTION}: columns must map our names to those of the logs")

    def named(line: dict[str, Any], ours: str) -> Any:
        known = (asked.get(ours), *_USUAL.get(ours, ()), ours)
        return next((line[name] for name in known if name in line), None)

    steps: dict[float, dict[str, Any]] = {}  # each chart has one number of a step
    for logged in _logged(folder, sorted(entries)):
        line = {k: v for k, v in logged.items() if is_number(v)}
        if (step := named(line, "step")) is not None:
            steps.setdefault(step, {}).update(line)
    lines = [steps[step] for step in sorted(steps)]
    for line in lines:  # whole: of several names for one thing the first is taken
        own = ((ours, named(line, ours)) for ours in (*_USUAL, *asked))
        line |= {ours: value for ours, value in own if value is not None}
    if name == "metrics.jsonl":
        return lines
    return [
        {"metric": column, "value": value, "step": line["step"], "better": better}
        for line in lines
        for column, value in line.items()
        if (found := _SCORE.match(column)) or column in asked.keys() - _USUAL.keys()
        for better in [_BETTER[found[1]] if found else "lower"]
    ]


def _logged(folder: Path, entries: list[str]) -> list[dict[str, Any]]:
    """Return the logged rows, under the names of whoever logged them."""
    if any(name.startswith(_EVENTS) for name in entries):
        return _events(folder)
    rows, runs = list[dict[str, Any]](), set[str]()
    tables = [name for name in entries if _TABLE.fullmatch(name)]
    for name in tables:
        for row in _table(folder / name):
            if name.startswith(_CHART):  # the run's name stands before a column's
                runs |= {head.rpartition(" - ")[0] for head in row if " - " in head}
                row = {head.rpartition(" - ")[2]: value for head, value in row.items()}
            rows.append(row)
    if len(runs) > 1:
        raise Damaged(f"{_CHART}*.csv holds {len(runs)} runs; export one, in a folder of its own")
    if tables:
        return rows
    # Of an offline folder the curve is in W&B's own binary file, the last values in a summary.
    if (folder / _SUMMARY).is_file():
        return [read_json(folder / _SUMMARY)]
    raise Damaged(
        "a .wandb file is read by wandb alone; sync it, and put "
        "wandb.Api().run(...).history(samples=10**6).to_csv('history.csv') beside it"
    )


def _table(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a history or chart, without the ends that charts have of each value."""
    try:
        if path.suffix == ".jsonl":
            return read_lines(path)
        if path.suffix == ".json":
            rows = json_of(bytes_of(path), path.name)
            return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
        frame = pd.read_csv(io.BytesIO(bytes_of(path)), encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise Damaged(f"{path.name} cannot be read ({error})") from None
    numbers = frame.loc[:, ~frame.columns.str.endswith(("__MIN", "__MAX"))]
    rows = numbers.apply(pd.to_numeric, errors="coerce").to_dict("records")
    return [{k: int(v) if v % 1 == 0 else v for k, v in row.items() if v == v} for row in rows]


def _events(folder: Path) -> list[dict[str, Any]]:
    """Return the scalars of TensorBoard's event files by step, with seconds from the first."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError:
        raise Damaged("event files need TensorBoard's reader: pip install tensorboard") from None
    log = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    log.Reload()
    tags = log.Tags()
    found = [(e.wall_time, e.step, t, e.value) for t in tags["scalars"] for e in log.Scalars(t)]
    for tag in tags["tensors"]:  # as TensorFlow's own writer has them
        for e in log.Tensors(tag):
            value = make_ndarray(e.tensor_proto)
            if value.ndim == 0 and value.dtype.kind in "fiu":
                found.append((e.wall_time, e.step, tag, value.item()))
    began, rows = min((time for time, *_ in found), default=0.0), dict[int, dict[str, Any]]()
    for time, step, tag, value in sorted(found):
        rows.setdefault(step, {}).update({"step": step, "time": time - began, tag: value})
    return list(rows.values())
