"""Run folders as tidy data frames: a row per run, per score, or per logged step.

`load` returns a row per finished run with its configuration in columns, `scores` a row per run,
step and metric with what it had cost, `curves` a row per run and logged step. docs/dataframe.md
lists the columns.

Everything is in columns, nothing in `attrs`, so that frames survive merge, concat and parquet.
After concat call `analysis.runs.grouping.assign_groups` (tables and figures do it themselves).
"""

import argparse
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.errors import AnalysisError
from analysis.runs import run_files
from analysis.runs.archives import unpacked
from analysis.runs.filters import select
from analysis.runs.grouping import assign_groups
from analysis.runs.run_files import Damaged, shown
from analysis.runs.run_rows import STATUS, read_run, typed
from backbones.parsing import is_number
from experiments.runtime.console import show

Roots = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Runs = pd.DataFrame | Roots
MARKS = ("config.yaml", "summary.json", "status.json", "metrics.jsonl")
# Columns of a run that curves repeat on every row.
IDENTITY = (
    "run", "path", "group", "variant", "method", "backbone", "size", "data", "scale", "route",
    "span", "rate", "seed",
)  # fmt: skip
# Columns that a frame without runs has, too.
_ALWAYS = (
    *IDENTITY, "root", "status", "step", "objective", "selection", "guidance", "sampler",
    "reference", "networks", "config_keys",
)  # fmt: skip
# Columns of a score.
SCORE = (
    "metric", "key", "value", "step", "macs", "better", "n", "features", "reference", "guidance",
    "sampler", "weights", "sample_seed", "macs_per_sample", "own", "final",
)  # fmt: skip
# Columns of a run that are renamed beside a score, which has columns of the same names.
RENAMED = {
    "step": "last_step", "guidance": "own_guidance", "sampler": "own_sampler",
    "reference": "own_reference",
}  # fmt: skip
_TEXTS = ("metric", "key", "better", "features", "reference", "guidance", "sampler", "weights")
_PROBLEM = ("run", "path", *STATUS, "status", "reason")


def find(root: str | os.PathLike[str]) -> list[Path]:
    """Return every run folder at or below a folder, sorted; hidden folders and links are skipped.

    `AnalysisError` if `root` is no folder.
    """
    # `.` and `..` do not contain the folder's name, which is the run's.
    top = Path(root).resolve() if Path(root).name in ("", "..") else Path(root)
    if not top.is_dir():
        raise AnalysisError(f"{root} is not a folder: expected the folder of your runs")

    def refuse(error: OSError) -> None:
        raise error

    folders = []
    for folder, subfolders, files in os.walk(top, onerror=refuse):
        if not set(MARKS).isdisjoint([*subfolders, *files]):
            folders.append(Path(folder))
            subfolders.clear()
        for name in list(subfolders):
            if name.startswith("."):
                subfolders.remove(name)
    return sorted(folders)


@dataclass(frozen=True)
class RunFolder:
    """What lies below a folder: finished runs, and folders that are not (yet) finished runs.

    `problems` has the columns run, path, status (`damaged`, or the last status of an unfinished
    run), reason (of damage), step, steps, eta_s and error.
    """

    runs: pd.DataFrame
    problems: pd.DataFrame

    @property
    def damaged(self) -> pd.DataFrame:
        """Folders that cannot be read."""
        return self.problems[self.problems["status"] == "damaged"]

    @property
    def unfinished(self) -> pd.DataFrame:
        """Runs without a summary."""
        return self.problems[self.problems["status"] != "damaged"]


def read_folder(root: Roots, filters: Mapping[str, Any] | None = None) -> RunFolder:
    """Read every run below one folder or several, or those that meet all filters.

    `AnalysisError` if a folder is none, or for what `filters.select` refuses.
    """
    rows: list[dict[str, Any]] = []
    problems: list[dict[str, Any]] = []
    roots = [root] if isinstance(root, str | os.PathLike) else list(root)
    folders: dict[Path, str] = {}
    for one_root in roots:
        source = unpacked(Path(one_root))
        for folder in find(source):
            folders.setdefault(folder, str(source))
    for folder, folder_root in folders.items():
        try:
            row = read_run(folder)
        except Damaged as error:
            damage = {"run": shown(folder.name), "path": shown(folder)}
            problems.append({**damage, "status": "damaged", "reason": str(error)})
            continue
        if row["status"] == "done":
            row["root"] = folder_root
            rows.append(row)
        else:
            problems.append(row)
    runs = typed(rows)
    if runs.empty:
        runs = runs.reindex(columns=list(_ALWAYS)).astype({"path": "string"})
    runs = assign_groups(runs)
    if filters:
        # Labels of groups name what differs between the remaining runs.
        runs = assign_groups(select(runs, filters))
    return RunFolder(runs, typed(problems).reindex(columns=list(_PROBLEM)))


def load(root: Roots, **filters: Any) -> pd.DataFrame:
    """Load the finished runs below one or several folders, filtered if desired.

        analysis.load(["runs", "more"], backbone=["dit", "mamba"], where="lr < 3e-3")

    Args:
        root: Folder with run folders, at any depth, one run folder, or an archive of records
            (.tar.gz), which is unpacked once below `runs/.published`; or a list of them.
        filters: As on the command line of `python -m analysis` (see `analysis.runs.filters`): a
            value or a list of values by key, `where` an expression, `grid` the name of a launched
            grid. A key with a dot is given as `**{"train.lr": 1e-3}`.

    Returns:
        One row per finished run (docs/dataframe.md lists the columns), sorted by folder.
        Damaged folders are left out with a warning; `analysis.problems` lists them and the
        unfinished runs.

    Raises:
        AnalysisError: if `root` is no folder or archive, or a filter names no key or grid.
    """
    folder = read_folder(root, filters)
    if len(folder.damaged):
        first = folder.damaged.iloc[0]
        warnings.warn(
            f"{len(folder.damaged)} damaged run folders were left out, such as {first['run']}: "
            f"{first['reason']}",
            stacklevel=2,
        )
    return folder.runs


def problems(root: Roots) -> pd.DataFrame:
    """Return the unfinished and damaged run folders below a folder, one per row.

    Columns: run, path, status (`damaged`, or the last status), reason, step, steps, eta_s, error.
    """
    return read_folder(root).problems


def runs_of(source: Runs) -> pd.DataFrame:
    """Return runs that were loaded, or load them.

    `AnalysisError` for a data frame that lacks the columns that identify a run.
    """
    if not isinstance(source, pd.DataFrame):
        return load(source)
    missing = [name for name in ("run", "path", "backbone", "route") if name not in source]
    if missing:
        raise AnalysisError(
            f"this DataFrame has no column {', '.join(missing)}; give what analysis.load returned"
        )
    return source


# --- scores and curves ----------------------------------------------------------------------------


def scores(runs: Runs) -> pd.DataFrame:
    """Return every score of every run, with the training cost up to its step.

    Args:
        runs: What `analysis.load` returned, or a folder.

    Returns:
        One row per run, step, metric and protocol, of `scores.jsonl` and of
        `evaluations/*.json` (docs/dataframe.md lists the columns). `macs` is read from the training
        log, linearly between logged steps. A run whose scores cannot be read is left out with a
        warning.
    """
    frame = runs_of(runs)
    rows: list[dict[str, Any]] = []
    for path in frame["path"]:
        rows += _read_or_warn(Path(str(path)), _score_rows)
    table = typed(rows).reindex(columns=["path", *SCORE])
    table = table.astype(dict.fromkeys(("path", *_TEXTS), "string"))
    if not pd.api.types.is_numeric_dtype(table["step"]):  # no score has a step
        table["step"] = table["step"].astype("Int64")
    config = frame.loc[:, ~frame.columns.str.startswith("score.")].rename(columns=RENAMED)
    return config.merge(table, on="path", how="right")


def _score_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of one run's scores, without the columns of the run."""
    lines = run_files.read_scores(folder / "scores.jsonl")
    own = run_files.own_scores(lines)
    final = run_files.last_scores(own)
    rows = []
    for line in lines:
        rows.append(_score_row(line, own=line in own, final=line in final))
    for line in evaluations(folder):
        rows.append(_score_row(line, own=False, final=False))
    for line in run_files.guidance_scales(folder):
        rows.append(_score_row(line, own=True, final=False))
    steps, macs = _training_cost(folder)
    for row in rows:
        row["path"] = str(folder)
        row["macs"] = _cost_at(row["step"], steps, macs)
    return rows


def _score_row(line: dict[str, Any], own: bool, final: bool) -> dict[str, Any]:
    row = {key: line.get(key) for key in SCORE}
    cost = line.get("macs_per_sample")
    row["macs_per_sample"] = float(cost) if is_number(cost) else float("nan")
    row["sample_seed"] = line.get("seed")
    row["weights"] = line.get("weights") or "ema"
    return row | {"own": own, "final": final}


def evaluations(folder: Path) -> list[dict[str, Any]]:
    """Return the scores that `evaluate.py` wrote beside a run; warn of unreadable records."""
    lines: list[dict[str, Any]] = []
    for path in sorted((folder / "evaluations").glob("*.json")):
        try:
            record = run_files.read_json(path)
            weights, stored = record.get("kind"), record.get("scores")
            if not isinstance(stored, list):
                raise Damaged("it has no list of scores")
        except Damaged as error:
            _warn(folder, f"evaluations/{path.name} cannot be read: {error}")
            continue
        for stored_line in stored:
            if not isinstance(stored_line, dict):
                continue
            line = {"weights": weights, **stored_line}
            # Two records of one evaluation (other options, same samples) may hold the same line.
            if run_files.is_score(line) and line not in lines:
                lines.append(line)
    return lines


def _training_cost(folder: Path) -> tuple[list[float], list[float]]:
    """Return logged steps and the multiply-adds spent by then, from the origin on."""
    steps, macs = [0.0], [0.0]
    for line in run_files.read_lines(folder / "metrics.jsonl"):
        if is_number(line.get("step")) and is_number(line.get("macs")):
            steps.append(float(line["step"]))
            macs.append(float(line["macs"]))
    return steps, macs


def _cost_at(step: float | None, steps: list[float], macs: list[float]) -> float:
    """Return the cost at a step; beyond the last logged one at the run's mean cost per step."""
    if step is None or len(steps) < 2 or steps[-1] <= 0:
        return float("nan")
    if step > steps[-1]:
        return macs[-1] * step / steps[-1]
    return float(np.interp(step, steps, macs))


def curves(runs: Runs, columns: Sequence[str] = ("time", "loss", "macs")) -> pd.DataFrame:
    """Return the training curves.

    Args:
        runs: What `analysis.load` returned, or a folder.
        columns: Fields of `metrics.jsonl` beside `step`; one that a run lacks is NaN.

    Returns:
        One row per run and logged step: what identifies the run (run, path, group, variant, seed,
        ...), `step` and the columns asked for. A run whose log cannot be read is left out with a
        warning.
    """
    frame = runs_of(runs)

    def read(folder: Path) -> list[dict[str, Any]]:
        rows = []
        for line in run_files.read_lines(folder / "metrics.jsonl"):
            if is_number(line.get("step")):
                row = {"path": str(folder), "step": int(line["step"])}
                for key in columns:
                    row[key] = line[key] if is_number(line.get(key)) else float("nan")
                rows.append(row)
        return rows

    rows: list[dict[str, Any]] = []
    for path in frame["path"]:
        rows += _read_or_warn(Path(str(path)), read)
    table = pd.DataFrame(rows, columns=["path", "step", *columns]).astype({"path": "string"})
    identity = frame[list(frame.columns.intersection(list(IDENTITY)))]
    return identity.merge(table, on="path", how="right")


def _read_or_warn(folder: Path, read: Any) -> list[dict[str, Any]]:
    """Read a run's rows; one that cannot be read has none and is named in a warning."""
    try:
        return list(read(folder))
    except (Damaged, ValueError, TypeError) as error:
        _warn(folder, str(error))
        return []


def _warn(folder: Path, reason: str) -> None:
    warnings.warn(f"{shown(folder.name)}: {reason}", stacklevel=2)


def command(options: argparse.Namespace) -> int:
    """Print every run folder with its state."""
    folder = read_folder(options.runs)
    for row in folder.runs.to_dict("records"):
        show(f"done        {row['run']}  step {row['step']}")
    for row in folder.unfinished.to_dict("records"):
        step = "" if pd.isna(row["step"]) else f"  step {row['step']}"
        show(f"{row['status']:<11} {row['run']}{step}")
    for row in folder.damaged.to_dict("records"):
        show(f"damaged     {row['run']}  {row['reason']}")
    counts = len(folder.runs), len(folder.unfinished), len(folder.damaged)
    show("{} done, {} unfinished, {} damaged".format(*counts))
    return 0
