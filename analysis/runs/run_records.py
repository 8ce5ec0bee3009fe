"""Run folders to one tidy data frame: a row per finished run, config and scores as typed columns.

A run folder is any folder that holds `config.yaml`, `summary.json`, `status.json` or
`metrics.jsonl`. Columns:

    run, path, status                        the folder
    backbone, size, data, scale, route, ...  from summary.json
    device, torch, commit                    what it ran on, from env.json
    span, rate, variant, throughput          derived: blocks, rate, method, images/s over the run
    config.<dotted key>                      the resolved config; lists as JSON text
    score.<full metric name>                 the run's own last scores, as "score.FD-500 (...)"
    guidance, sampler, reference, score_n    the protocol of those scores

Nothing is fatal: `df.attrs["damaged"]` lists folders that cannot be read, with the reason, and
`df.attrs["unfinished"]` those without a summary, with their last status.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from analysis.runs.record_checks import fault, is_score, is_text
from analysis.runs.treatment import derive
from analysis.runs.typed_columns import typed
from backbones.sizes import BackboneError, parse_size
from routing.errors import UserError
from routing.route import RouteError

MARKS = ("config.yaml", "summary.json", "status.json", "metrics.jsonl")
# A few lines of YAML whose aliases hold aliases stand for more values than any memory.
_MOST_VALUES = 100_000
_DEEPEST = 50
_SUMMARY = (
    "name", "hash", "backbone", "size", "data", "scale", "seed", "route", "step", "params",
    "macs_dense", "macs_routed", "macs_dense_no_attention", "macs_routed_no_attention", "wall_s",
    "images_per_s",
)  # fmt: skip
_STATUS = ("step", "steps", "eta_s", "error")
# Scores under another of these are comparisons of their own.
PROTOCOL = ("guidance", "sampler", "weights", "seed")


class AnalysisError(UserError):
    """Runs, tables or figures were asked for in a way that cannot be met."""


class Damaged(Exception):
    """A run folder whose files cannot be read; the text is the reason."""


def find(root: str | os.PathLike[str]) -> list[Path]:
    """Return every run folder at or below `root`, sorted; hidden folders and links are not entered.

    Raises:
        AnalysisError: if `root` is no folder.
    """
    top = Path(root)
    if not top.is_dir():
        raise AnalysisError(
            f"{root} is not a folder; give the folder that holds the runs, such as runs"
        )
    return sorted(_walk(str(top)))


def _walk(folder: str) -> Iterator[Path]:
    with os.scandir(folder) as entries:
        children = list(entries)
    if any(entry.name in MARKS for entry in children):
        yield Path(folder)
        return
    for entry in children:
        if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
            yield from _walk(entry.path)


def load(root: str | os.PathLike[str]) -> pd.DataFrame:
    """Read every run below a folder.

    Args:
        root: Folder with run folders, at any depth, or one run folder.

    Returns:
        One row per finished run (columns above), sorted by run name; `attrs` holds `root`,
        `damaged` (dicts with path and reason), `unfinished` (dicts with path, status, step, steps,
        error) and `metrics` (full name to better, features, n).

    Raises:
        AnalysisError: if `root` is no folder.
    """
    rows: list[dict[str, Any]] = []
    damaged: list[dict[str, str]] = []
    unfinished: list[dict[str, Any]] = []
    metrics: dict[str, dict[str, Any]] = {}
    for folder in find(root):
        try:
            row = read_run(folder, metrics)
        except Damaged as error:
            damaged.append({"run": shown(folder.name), "path": shown(folder), "reason": str(error)})
            continue
        (rows if row.get("status") == "done" else unfinished).append(row)
    keys = ("run", "path", "status", *_STATUS)
    # Few versions wrote all runs: their key sets are kept once, and a run has a number.
    versions = {
        text: place for place, text in enumerate(dict.fromkeys(r["config_keys"] for r in rows))
    }
    for row in rows:
        row["config_keys"] = versions[row["config_keys"]]
    frame = typed(rows)
    frame.attrs = {
        "root": str(root),
        "damaged": damaged,
        "unfinished": [{key: row[key] for key in keys if key in row} for row in unfinished],
        "metrics": metrics,
        "config_keys": [text.split(",") for text in versions],
    }
    return frame


def read_run(folder: Path, metrics: dict[str, dict[str, Any]] | None = None) -> dict[str, Any]:
    """Read one run folder into a flat dict.

    An unfinished run gives run, path and what its status says.

    Args:
        folder: The run folder.
        metrics: Filled with what each full metric name means, for `load`.

    Raises:
        Damaged: if a file that should be there is missing or unreadable.
    """
    check_path(folder)
    row: dict[str, Any] = {"run": folder.name, "path": str(folder)}
    if not (folder / "summary.json").exists():
        if not (folder / "status.json").exists():
            raise Damaged("neither summary.json nor status.json")
        status = _json(folder / "status.json")
        row.update((key, status[key]) for key in _STATUS if key in status)
        # A summary is the proof of an end: a heartbeat alone never makes a run finished.
        said = str(status.get("status", "unknown"))
        row["status"] = "unfinished" if said == "done" else said
        return row
    summary = _json(folder / "summary.json")
    row["status"] = str(summary.get("status", "unknown"))
    row.update({key: summary.get(key) for key in _SUMMARY})
    config = _config(folder / "config.yaml")
    row.update(config)
    if wrong := fault(row):
        raise Damaged(wrong)
    row.update(_machine(folder))
    # A key that a run's version did not know is not the same as one that is null.
    row["config_keys"] = ",".join(sorted(config))
    try:
        derive(row)
        parse_size(row["size"])
    except RouteError as error:
        raise Damaged(f"its route cannot be read ({error})") from None
    except BackboneError as error:
        raise Damaged(f"its size cannot be read ({error})") from None
    own = own_scores(read_lines(folder / "scores.jsonl"))
    for line in own:
        row[f"score.{line['metric']}"] = line["value"]
        if metrics is not None:
            known = {key: line.get(key) for key in ("key", "better", "features", "n")}
            metrics.setdefault(line["metric"], known)
    if own:
        first = own[0]
        row.update(
            {key: first.get(key) for key in ("guidance", "sampler", "reference")},
            score_n=first.get("n"),
        )
    return row


def check_path(folder: Path) -> None:
    """Refuse a folder whose name no table, page or terminal can show.

    Raises:
        Damaged: if its path is not UTF-8.
    """
    if not is_text(str(folder)):
        raise Damaged("its name has bytes that are not UTF-8; rename the folder")


def shown(path: str | Path) -> str:
    """Return a path as text that can be written, with escapes for bytes that are not UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _machine(folder: Path) -> dict[str, str | None]:
    """Return what a run ran on, from env.json; None where that is missing or of an older kind."""
    try:
        about = _json(folder / "env.json")
    except Damaged:
        about = {}
    packages = about.get("packages")
    torch = packages.get("torch") if isinstance(packages, dict) else None
    values = {"device": about.get("device"), "torch": torch, "commit": about.get("git")}
    return {key: value if isinstance(value, str) else None for key, value in values.items()}


def own_scores(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a run's own scores: its last step under the protocol of its first score.

    Later evaluations under another guidance, sampler, seed or reference are further lines of the
    same file; they are comparisons of their own (see `analysis.scores`) and never replace the run's
    score.
    """
    usable = [line for line in lines if is_score(line)]
    if not usable:
        return []
    protocol = [usable[0].get(key) for key in PROTOCOL]
    same = [line for line in usable if [line.get(key) for key in PROTOCOL] == protocol]
    last = max(_step(line) for line in same)
    return [line for line in same if _step(line) == last]


def _step(line: dict[str, Any]) -> float:
    step = line.get("step")
    return step if isinstance(step, int | float) else 0


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
        text = json.dumps(value, ensure_ascii=False)
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{path.name} cannot be read ({type(error).__name__})") from None
    if not isinstance(value, dict):
        raise Damaged(f"{path.name} holds no mapping")
    if "\\u0000" in text or not is_text(text):
        raise Damaged(f"{path.name} has a character that is no text")
    return value


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file.

    A missing file is empty and a half-written last line is left out.

    Raises:
        Damaged: if a line before the last is no JSON object.
    """
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read ({type(error).__name__})") from None
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            found.append(value)
        elif number < len(lines):
            raise Damaged(f"{path.name} line {number} is not a JSON object")
    return found


def _config(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Damaged(f"config.yaml cannot be read ({type(error).__name__})") from None
    row: dict[str, Any] = {}
    for block in _blocks(text):
        row.update(_parse(block))
    if not row:
        raise Damaged("config.yaml is empty")
    return row


def _blocks(text: str) -> list[str]:
    """Split a document at its top-level keys, so that equal blocks are parsed once.

    The runs of a sweep differ in a few lines; the cache makes 2,000 configs cost as much as a few
    dozen.
    """
    if "&" in text or "*" in text or "---" in text:
        return [text]
    blocks: list[list[str]] = []
    for line in text.splitlines(keepends=True):
        starts = bool(line.strip()) and line[0] not in " -#]})\t"
        if starts or not blocks:
            blocks.append([])
        blocks[-1].append(line)
    return ["".join(block) for block in blocks]


@functools.lru_cache(maxsize=4096)
def _parse(block: str) -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        # The parser reads any depth, the loader behind it recurses in C until the process dies.
        depth = 0
        for event in yaml.parse(block, Loader=loader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:
                raise Damaged(f"config.yaml is nested more than {_DEEPEST} levels deep")
        value = yaml.load(block, Loader=loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise Damaged(f"config.yaml is not YAML ({type(error).__name__})") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Damaged("config.yaml holds no mapping")
    if _weight(value, {}) > _MOST_VALUES:
        raise Damaged("config.yaml refers to itself more often than any configuration does")
    return dict(flatten(value, "config"))


def _weight(value: Any, known: dict[int, float]) -> float:
    """Count the values that a document has once its aliases are written out, in linear time."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in known:
        known[id(value)] = math.inf  # what holds itself has no end
        children = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_weight(child, known) for child in children)
    return known[id(value)]


def flatten(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield `("prefix.key", leaf)` for a nested mapping; lists become JSON text."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield from flatten(child, f"{prefix}.{key}")
    elif isinstance(value, list | tuple):
        yield prefix, json.dumps(value, default=str)
    else:
        yield prefix, value
