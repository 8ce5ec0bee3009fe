"""What differs between runs: two of them side by side, or any number by the keys that vary."""

import argparse
import os
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from analysis.comparison import step_penalty
from analysis.errors import AnalysisError
from analysis.runs.run_files import Damaged
from analysis.runs.run_rows import read_run
from experiments.config.removed_keys import REMOVED
from experiments.runtime.console import show

# Names and paths of a run are not compared.
_IGNORED_PREFIXES = ("run", "path", "name", "hash", "config_keys", "config.paths.")
# Older runs repeat `config.route` in the first; wall-clock times reflect the load of the machine.
_IGNORED_KEYS = ("config.routing.route", "wall_s", "images_per_s")
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
    return _differences(_read(first), _read(second))


def _differences(
    first_row: dict[str, Any], second_row: dict[str, Any]
) -> tuple[list[Difference], list[Difference], list[Difference]]:
    differences: dict[str, list[Difference]] = {"config": [], "score": [], "": []}
    for key in dict.fromkeys([*first_row, *second_row]):
        if key.startswith(_IGNORED_PREFIXES) or key in _IGNORED_KEYS:
            continue
        group, dot, name = key.partition(".")
        kind = group if dot and group in differences else ""
        a, b = first_row.get(key), second_row.get(key)
        equal = a == b or (a != a and b != b)  # the rate of a route with several is NaN
        if equal and kind != "score":
            continue
        if kind == "config":
            # Unset is not the same as unknown to a run's version.
            a = "null" if key in first_row and a is None else a
            b = "null" if key in second_row and b is None else b
        differences[kind].append(Difference(name if kind else key, a, b))
    return differences["config"], differences["score"], differences[""]


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
    # Removed keys at their default: older runs have them, newer ones do not.
    for key, value in REMOVED.items():
        if row.get(f"config.{key}", _ABSENT) == value:
            del row[f"config.{key}"]
    return row


def text(first: str | Path, second: str | Path) -> str:
    """Return the comparison of two runs as aligned text."""
    first_run, second_run = _read(first), _read(second)
    config, scores, cost = _differences(first_run, second_run)
    lines = []
    for side, run in (("A", first_run), ("B", second_run)):
        lines.append(f"{side}  {run['run']}, step {run['step']}")
    same_steps = first_run["step"] == second_run["step"]
    for title, rows in (("config", config), ("scores", scores), ("size and cost", cost)):
        lines += ["", title if rows else f"{title}: the same"]
        key_width = max((len(row.key) for row in rows), default=0)
        value_width = max((len(_show(row.first)) for row in rows), default=0)
        for row in rows:
            line = f"  {row.key:<{key_width}}  {_show(row.first):>{value_width}}"
            line += f"  ->  {_show(row.second)}"
            # A score after more steps, or in the features of another network, is no difference of
            # the configurations.
            comparable = title == "scores" and same_steps and None not in row
            if comparable and _network(first_run, row.key) == _network(second_run, row.key):
                line += f"   ({row.second - row.first:+.4g})"
            lines.append(line.rstrip())
    speeds = [run["images_per_s"] for run in (first_run, second_run)]
    if None not in speeds:
        first_speed, second_speed = map(_show, speeds)
        lines += ["", f"training speed  {first_speed}  ->  {second_speed} images/s"]
        lines[-1] += "   (varies with the machine's load)"
    penalty = _penalty_line(first_run, second_run)
    if penalty:
        lines += ["", penalty]
    return "\n".join(lines)


def _penalty_line(first_run: dict[str, Any], second_run: dict[str, Any]) -> str:
    """Return the step penalty of B over A; nothing unless both logged losses with one seed."""
    curves: list[pd.DataFrame] = []
    for run in (first_run, second_run):
        curves += step_penalty.loss_curves(run["path"]).values()
    same_data = first_run["data"] == second_run["data"]
    same_seed = first_run["seed"] == second_run["seed"]
    if len(curves) != 2 or not (same_data and same_seed) or min(map(len, curves)) < 2:
        return ""
    penalties = step_penalty.penalties_by_step({0: curves[0]}, {0: curves[1]})
    reached = [step for step, penalty in penalties.items() if not penalty.censored]
    if not penalties:
        return ""
    if not reached:
        return "step penalty of B over A: censored, B reaches no loss of A"
    step = max(reached)
    s, sm = penalties[step].seeds.loc[0, ["s", "sm"]]
    text = f"step penalty of B over A (one seed): s {s:.3g}, s*m {sm:.3g} at N = {step:.0f}"
    censored = [f"{step:.0f}" for step in penalties if step > max(reached)]
    return text + (f"; censored at N = {', '.join(censored)}" if censored else "")


def _network(run: dict[str, Any], metric: str) -> str | None:
    """Return the network behind a run's score, `digits-classifier@d2f54a3c`, None without one."""
    extractor = metric.rpartition("(")[2].removesuffix(")")
    networks = str(run.get("networks") or "").split()
    return next((name for name in networks if name.partition("@")[0] == extractor), None)


def _show(value: Any) -> str:
    if value is None:
        return "missing"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def command(options: argparse.Namespace) -> int:
    """Print what differs between two runs."""
    if options.more:
        raise AnalysisError(
            f"compare takes two runs, not {2 + len(options.more)}; the tables treatments and "
            "differences compare more (python -m analysis tables RUNS --only treatments), and the "
            "report lists the keys that vary (python -m analysis report RUNS)"
        )
    show(text(options.first, options.second))
    return 0
