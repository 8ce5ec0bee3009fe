"""Curves and scores over a run's life: steps, multiply-adds and hours on the same rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.runs import Damaged, load, read_lines

_IDENTITY = ("run", "backbone", "size", "data", "scale", "route", "span", "rate", "variant", "seed")


def _frame(runs: pd.DataFrame | str | Path) -> pd.DataFrame:
    return runs if isinstance(runs, pd.DataFrame) else load(runs)


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
    return _collect(_frame(runs), lambda row: _curve(Path(row["path"]), columns))


def _curve(folder: Path, columns: Sequence[str]) -> pd.DataFrame:
    lines = [line for line in read_lines(folder / "metrics.jsonl") if "step" in line]
    data = {
        key: pd.to_numeric([line.get(key) for line in lines], errors="coerce") for key in columns
    }
    frame = pd.DataFrame({"step": [int(line["step"]) for line in lines], **data})
    if "time" in frame:
        frame["hours"] = frame["time"] / 3600
    return frame


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
    return _collect(_frame(runs), _scores)


def _scores(row: dict[str, Any]) -> pd.DataFrame:
    folder = Path(row["path"])
    own = read_lines(folder / "scores.jsonl")
    later, problems = evaluations(folder)
    frame = pd.DataFrame([*own, *later])
    frame["first_hand"] = [True] * len(own) + [False] * len(later)
    if frame.empty or not {"metric", "value"} <= set(frame.columns):
        return _with_problems(pd.DataFrame(), problems)
    frame = frame[pd.to_numeric(frame["value"], errors="coerce").notna()].reset_index(drop=True)
    if "seed" in frame:
        frame = frame.rename(columns={"seed": "sample_seed"})
    for key in ("guidance", "sampler", "weights", "sample_seed", "step"):
        if key not in frame:
            frame[key] = None
    # As words, so that two missing values are equal.
    protocol = frame[["guidance", "sampler", "weights", "sample_seed"]].map(str)
    same = (protocol == protocol.iloc[0]).all(axis=1) if len(frame) else False
    frame["own"] = same & frame.pop("first_hand")
    curve = _curve(folder, ("time", "macs"))
    at = pd.to_numeric(frame["step"], errors="coerce").to_numpy(dtype=float)
    frame["macs"] = _at(at, curve, "macs")
    frame["hours"] = _at(at, curve, "hours")
    return _with_problems(frame, problems)


def evaluations(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return what `evaluate.py` wrote beside a run, and the records that cannot be read."""
    lines: list[dict[str, Any]] = []
    problems = []
    for path in sorted((folder / "evaluations").glob("*.json")):
        try:
            record = json.loads(path.read_bytes())
            found = [line for line in record["scores"] if isinstance(line, dict)]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            problems.append(f"evaluations/{path.name} cannot be read ({type(error).__name__})")
            continue
        # Two records of one evaluation (other options, same samples) may hold the same line.
        lines += [line for line in found if line not in lines]
    return lines, problems


def _with_problems(frame: pd.DataFrame, problems: list[str]) -> pd.DataFrame:
    frame.attrs["problems"] = problems
    return frame


def _at(steps: np.ndarray, curve: pd.DataFrame, column: str) -> np.ndarray:
    """Cost at each step.

    Before the first and after the last logged step it goes on at the run's mean cost.
    """
    known = curve[["step", column]].dropna()
    if known.empty:
        return np.full(len(steps), np.nan)
    x = np.concatenate([[0.0], known["step"].to_numpy(dtype=float)])
    y = np.concatenate([[0.0], known[column].to_numpy(dtype=float)])
    inside = np.interp(steps, x, y)
    return np.where(steps > x[-1], y[-1] * steps / max(x[-1], 1.0), inside)


def _collect(frame: pd.DataFrame, read: Any) -> pd.DataFrame:
    parts: list[pd.DataFrame] = []
    damaged: list[dict[str, str]] = []
    for row in frame.to_dict("records"):
        try:
            part = read(row)
        except (Damaged, ValueError, TypeError) as error:
            damaged.append({"run": row["run"], "path": row["path"], "reason": str(error)})
            continue
        damaged += [
            {"run": row["run"], "path": row["path"], "reason": text}
            for text in part.attrs.pop("problems", [])
        ]
        if part.empty:
            continue
        for name in reversed([name for name in _IDENTITY if name in row]):
            part.insert(0, name, row[name], allow_duplicates=False)
        parts.append(part)
    result = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["run", "step"])
    result.attrs = {"damaged": damaged, "metrics": frame.attrs.get("metrics", {})}
    return result
