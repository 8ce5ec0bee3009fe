"""What differs between runs: two of them side by side, or any number by the keys that vary."""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from analysis.runs.run_files import Damaged
from analysis.runs.run_records import AnalysisError, read_run

# Where a run stands on disk says nothing about what it is.
_ASIDE = ("run", "path", "name", "hash", "config_keys", "config.paths.")
# What `config.route` and `throughput` say too.
_TWICE = ("config.routing.route", "images_per_s")


class Difference(NamedTuple):
    """One key in which two runs differ; a missing side is None."""

    key: str
    first: Any
    second: Any


def pair(
    first: str | Path, second: str | Path
) -> tuple[list[Difference], list[Difference], list[Difference]]:
    """Return what differs between two runs: config, scores (equal ones too), cost and size.

    `AnalysisError` if a folder is no finished run.
    """
    one, two = _read(first), _read(second)
    found: dict[str, list[Difference]] = {"config": [], "score": [], "": []}
    for key in dict.fromkeys([*one, *two]):
        a, b = one.get(key), two.get(key)
        kind = next(kind for kind in found if key.startswith(f"{kind}." if kind else ""))
        if key.startswith(_ASIDE) or key in _TWICE:
            continue
        same = a == b or (a != a and b != b)  # the rate of a route with several is NaN
        if kind == "score" or not same:
            if kind == "config":  # unset is not the same as unknown to a run's version
                a, b = ("null" if row.get(key, 0) is None else row.get(key) for row in (one, two))
            found[kind].append(Difference(key.removeprefix(f"{kind}."), a, b))
    return found["config"], found["score"], found[""]


def _read(folder: str | Path) -> dict[str, Any]:
    path = Path(os.path.abspath(folder))
    if not path.is_dir():
        raise AnalysisError(f"{folder} is not a run folder; give two folders of finished runs")
    try:
        row = read_run(path)
    except Damaged as error:
        raise AnalysisError(f"{folder} cannot be compared: {error}; give finished runs") from None
    if row.get("status") != "done":
        raise AnalysisError(f"{folder} is {row.get('status')}, not done; wait for its end")
    return row


def text(first: str | Path, second: str | Path) -> str:
    """Return the comparison of two runs as aligned text."""
    config, scores, rest = pair(first, second)
    names = [(row["run"], row["step"]) for row in map(_read, (first, second))]
    lines = [f"{side}  {name}, step {step}" for side, (name, step) in zip("AB", names, strict=True)]
    for title, rows in (("config", config), ("scores", scores), ("size, cost and time", rest)):
        lines += ["", title if rows else f"{title}: the same"]
        width = max((len(row.key) for row in rows), default=0)
        column = max((len(_show(row.first)) for row in rows), default=0)
        for row in rows:
            # A score after more steps is no difference of the configurations.
            paired = title == "scores" and names[0][1] == names[1][1] and None not in row
            gap = f"   ({row.second - row.first:+.4g})" if paired else ""
            sides = f"{_show(row.first):>{column}}  ->  {_show(row.second)}{gap}"
            lines.append(f"  {row.key:<{width}}  {sides}".rstrip())
    return "\n".join(lines)


def _show(value: Any) -> str:
    if value is None:
        return "missing"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def varying(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the config keys that differ between runs, and how many runs have each value.

    Columns key, value, runs; keys in order, the most frequent value first.
    """
    rows = [
        (key, str(value), int(n))
        for key, counts in _counted(frame)
        if len(counts) > 1
        for value, n in counts.items()
    ]
    return pd.DataFrame(rows, columns=["key", "value", "runs"])


def common(frame: pd.DataFrame) -> dict[str, str]:
    """Return the config keys that all runs share, with their value."""
    return {key: str(counts.index[0]) for key, counts in _counted(frame) if len(counts) == 1}


def _counted(frame: pd.DataFrame) -> Iterator[tuple[str, pd.Series]]:
    """Yield every config key with its values' counts."""
    for column in frame.columns:
        if column.startswith("config.") and not column.startswith("config.paths."):
            counts = frame[column].astype("string").fillna("null").value_counts()
            yield column.removeprefix("config."), counts


def command(options: argparse.Namespace) -> int:
    """Print what differs between two runs."""
    print(text(options.first, options.second))
    return 0
