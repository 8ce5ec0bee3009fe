"""Curves and scores over a run's life: steps, multiply-adds and hours on the same rows."""

from __future__ import annotations

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
        One row per run and logged step: identity columns, `step`, the columns asked for, and `hours`.
        `attrs["damaged"]` lists runs whose curve cannot be read.
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
        One row per score: identity columns, the fields of `scores.jsonl` (metric, key, value, n, guidance, ...),
        `own` (under the run's own protocol), `macs` (training multiply-adds spent by that step) and `hours`.
        The cost is read from the training log, linearly between logged steps.
    """
    return _collect(_frame(runs), _scores)


def _scores(row: dict[str, Any]) -> pd.DataFrame:
    folder = Path(row["path"])
    frame = pd.DataFrame(read_lines(folder / "scores.jsonl"))
    if frame.empty or not {"metric", "value"} <= set(frame.columns):
        return pd.DataFrame()
    frame = frame[pd.to_numeric(frame["value"], errors="coerce").notna()].reset_index(drop=True)
    if "seed" in frame:
        frame = frame.rename(columns={"seed": "sample_seed"})
    for key in ("guidance", "sampler", "weights", "sample_seed", "step"):
        if key not in frame:
            frame[key] = None
    # As words, so that two missing values are equal.
    protocol = frame[["guidance", "sampler", "weights", "sample_seed"]].map(str)
    frame["own"] = (protocol == protocol.iloc[0]).all(axis=1) if len(frame) else False
    curve = _curve(folder, ("time", "macs"))
    at = pd.to_numeric(frame["step"], errors="coerce").to_numpy(dtype=float)
    frame["macs"] = _at(at, curve, "macs")
    frame["hours"] = _at(at, curve, "hours")
    return frame


def _at(steps: np.ndarray, curve: pd.DataFrame, column: str) -> np.ndarray:
    """Cost at each step; before the first and after the last logged step it goes on at the run's mean cost."""
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
        if part.empty:
            continue
        for name in reversed([name for name in _IDENTITY if name in row]):
            part.insert(0, name, row[name], allow_duplicates=False)
        parts.append(part)
    result = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["run", "step"])
    result.attrs = {"damaged": damaged, "metrics": frame.attrs.get("metrics", {})}
    return result
