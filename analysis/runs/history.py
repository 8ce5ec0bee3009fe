"""Curves and scores over a run's life: steps, multiply-adds and hours on the same rows."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.runs.other_logs import records
from analysis.runs.run_files import Damaged, guidance_scales, is_score, protocol
from analysis.runs.run_records import load
from routing.parsing import is_number, json_of

_SCORE = ("metric", "key", "features", "guidance", "sampler", "macs_per_sample")
Read = Callable[[Mapping[Any, Any]], tuple[list[dict[str, Any]], list[str]]]
_IDENTITY = (
    "run", "setting", "treatment", "backbone", "size", "data", "scale", "route", "span", "rate",
    "variant", "seed",
)  # fmt: skip


def curves(
    runs: pd.DataFrame | str | Path, columns: Sequence[str] = ("time", "loss", "macs")
) -> pd.DataFrame:
    """Return the training curves.

    Args:
        runs: What `analysis.load` returned, or a folder.
        columns: Fields of `metrics.jsonl` beside `step`; one that a run lacks is NaN.

    Returns:
        One row per run and logged step: identity columns, `step`, the columns asked for, and
        `hours`. `attrs["damaged"]` lists runs whose curve cannot be read.
    """

    def curve(row: Mapping[Any, Any]) -> tuple[list[dict[str, Any]], list[str]]:
        rows = []
        for line in records(Path(row["path"]), "metrics.jsonl"):
            if is_number(line.get("step")):
                values = {key: line[key] if _has(line, key) else float("nan") for key in columns}
                if "time" in values:
                    values["hours"] = values["time"] / 3600
                rows.append({"step": int(line["step"]), **values})
        return rows, []

    return _collect(runs, curve)


def scores(runs: pd.DataFrame | str | Path) -> pd.DataFrame:
    """Return every score of every run with what it had cost to get there.

    Args:
        runs: What `analysis.load` returned, or a folder.

    Returns:
        One row per score, of `scores.jsonl` and of `evaluations/*.json`: identity columns, the
        fields of the score (metric, key, value, n, guidance, ...), `own` (the run's own, under its
        own protocol), `macs` (training multiply-adds spent by that step) and `hours`. The cost is
        read from the training log, linearly between logged steps.
    """
    frame = _collect(runs, _scores)
    for name in _SCORE:
        if name not in frame and not frame.empty:
            frame[name] = None
    return frame


def _scores(row: Mapping[Any, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    folder = Path(row["path"])
    own = [line for line in records(folder, "scores.jsonl") if is_score(line)]
    later, problems = evaluations(folder)
    # Steps and values of the costs in the training log, from the origin on.
    log, curve = records(folder, "metrics.jsonl"), {}
    for key in ("macs", "time"):
        known = [(float(line["step"]), float(line[key])) for line in log if _has(line, key)]
        curve[key] = ([0.0, *(x for x, _ in known)], [0.0, *(y for _, y in known)])
    scales = guidance_scales(folder)
    rows = []
    for place, line in enumerate([*own, *(line for line in later if is_score(line)), *scales]):
        found = {("sample_seed" if key == "seed" else key): value for key, value in line.items()}
        step = found.setdefault("step")
        at = float("nan") if step is None else float(step)
        of_run = place < len(own) and protocol(line) == protocol(own[0])
        found["own"] = of_run or line in scales
        found["macs"], found["hours"] = _at(at, *curve["macs"]), _at(at, *curve["time"]) / 3600
        rows.append(found)
    return rows, problems


def evaluations(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return what `evaluate.py` wrote beside a run, and the records that cannot be read."""
    lines: list[dict[str, Any]] = []
    problems = []
    for path in sorted((folder / "evaluations").glob("*.json")):
        try:
            record = json_of(path.read_bytes())
            found = [line for line in record["scores"] if isinstance(line, dict)]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            problems.append(f"evaluations/{path.name} cannot be read ({type(error).__name__})")
            continue
        # Two records of one evaluation (other options, same samples) may hold the same line.
        lines += [line for line in found if line not in lines]
    return lines, problems


def _has(line: dict[str, Any], key: str) -> bool:
    return all(is_number(line.get(name)) for name in ("step", key))


def _at(step: float, x: list[float], y: list[float]) -> float:
    """Cost at a step; after the last logged one it goes on at the run's mean cost."""
    if len(x) < 2 or math.isnan(step) or x[-1] <= 0:
        return float("nan")
    return y[-1] * step / x[-1] if step > x[-1] else float(np.interp(step, x, y))


def _collect(runs: pd.DataFrame | str | Path, read: Read) -> pd.DataFrame:
    """Read every run into rows, put its identity before them, and list what cannot be read."""
    frame = runs if isinstance(runs, pd.DataFrame) else load(runs)
    rows: list[dict[str, Any]] = []
    damaged: list[dict[str, str]] = []
    for row in frame.to_dict("records"):
        about = {"run": row["run"], "path": row["path"]}
        try:
            found, problems = read(row)
        except (Damaged, ValueError, TypeError) as error:
            found, problems = [], [str(error)]
        damaged += [{**about, "reason": text} for text in problems]
        identity = {name: row[name] for name in _IDENTITY if name in row}
        rows += [{**identity, **line} for line in found]
    result = pd.DataFrame(rows) if rows else pd.DataFrame(columns=["run", "step"])
    result.attrs = {"damaged": damaged, "metrics": frame.attrs.get("metrics", {})}
    return result
