"""What differs between runs: two of them side by side, or any number by the keys that vary."""

import argparse
import os
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from analysis.runs.run_files import Damaged
from analysis.runs.run_records import AnalysisError, read_run
from experiments.config.removed_keys import REMOVED

# Where a run stands on disk says nothing about what it is.
_ASIDE = ("run", "path", "name", "hash", "config_keys", "config.paths.")
# `config.route` says the first too; wall-clock times reflect the load of the machine.
_LEFT_OUT = ("config.routing.route", "wall_s", "images_per_s")
# Equal to no value.
_ABSENT = object()


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
        if key.startswith(_ASIDE) or key in _LEFT_OUT:
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
    # Older runs have these, newer ones do not, and both do the same.
    former = {f"config.{key}": value for key, value in REMOVED.items()}
    return {key: value for key, value in row.items() if former.get(key, _ABSENT) != value}


def text(first: str | Path, second: str | Path) -> str:
    """Return the comparison of two runs as aligned text."""
    config, scores, rest = pair(first, second)
    names = [(row["run"], row["step"]) for row in map(_read, (first, second))]
    lines = [f"{side}  {name}, step {step}" for side, (name, step) in zip("AB", names, strict=True)]
    for title, rows in (("config", config), ("scores", scores), ("size and cost", rest)):
        lines += ["", title if rows else f"{title}: the same"]
        shown = [(row.key, _show(row.first), _show(row.second)) for row in rows]
        width, column = (max((len(texts[i]) for texts in shown), default=0) for i in (0, 1))
        for row, (key, one, two) in zip(rows, shown, strict=True):
            # A score after more steps, or in the features of another network, is no difference of
            # the configurations.
            paired = title == "scores" and names[0][1] == names[1][1] and None not in row
            paired = paired and _network(first, key) == _network(second, key)
            gap = f"   ({row.second - row.first:+.4g})" if paired else ""
            lines.append(f"  {key:<{width}}  {one:>{column}}  ->  {two}{gap}".rstrip())
    return "\n".join(lines)


def _network(folder: str | Path, metric: str) -> str | None:
    """Return the network behind a run's score, `digits-classifier@d2f54a3c`, None without one."""
    extractor = metric.rpartition("(")[2].removesuffix(")")
    networks = str(_read(folder).get("networks") or "").split()
    return next((name for name in networks if name.partition("@")[0] == extractor), None)


def _show(value: Any) -> str:
    if value is None:
        return "missing"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def varying(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the config keys that differ between runs, and how many runs have each value.

    Columns key, value, runs; keys in order, the most frequent value first.
    """
    rows = [
        (column.removeprefix("config."), str(value), int(n))
        for column, counts in _counted(frame).items()
        if len(counts) > 1
        for value, n in counts.items()
    ]
    return pd.DataFrame(rows, columns=["key", "value", "runs"])


def common(frame: pd.DataFrame) -> dict[str, str]:
    """Return the config keys that all runs share, with their value."""
    counted = _counted(frame).items()
    return {c.removeprefix("config."): str(n.index[0]) for c, n in counted if len(n) == 1}


def _counted(frame: pd.DataFrame) -> dict[str, pd.Series]:
    """Return every config key's column with its values' counts."""
    kept = frame.filter(regex=r"^config\.(?!paths\.)").astype("string").fillna("null")
    return {str(column): kept[column].value_counts() for column in kept}


def command(options: argparse.Namespace) -> int:
    """Print what differs between two runs."""
    print(text(options.first, options.second))
    return 0
