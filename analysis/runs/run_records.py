"""Run folders to tidy data frames: a row per finished run, and its curves and scores over time.

A run folder is any folder that holds `config.yaml`, `summary.json`, `status.json` or
`metrics.jsonl`. Columns:

    run, path, status                        the folder
    backbone, size, data, scale, route, ...  from summary.json
    device, torch, commit                    what it ran on, from env.json
    span, rate, variant                      derived: blocks, rate, method
    config.<dotted key>                      the resolved config; lists as JSON text
    score.<full metric name>                 the run's own last scores, as "score.FD-500 (...)"
    guidance, sampler, reference, score_n    the protocol of those scores
    networks                                 networks behind them, as "mnist-classifier@114458aa"

Nothing is fatal: `df.attrs["damaged"]` lists folders that cannot be read, with the reason, and
`df.attrs["unfinished"]` those without a summary, with their last status.
"""

import argparse
import math
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from analysis.runs import run_files
from analysis.runs.run_files import Damaged, is_score, read_lines, shown
from backbones.sizes import BackboneError, parse_size
from experiments.runtime.parsing import is_number, json_of
from routing.errors import UserError, suggest
from routing.route import RouteError
from routing.schedule import RouteSchedule, ScheduleError

T = TypeVar("T")
Metrics = dict[str, dict[str, Any]]  # what each metric's name means
Runs = pd.DataFrame | str | Path
MARKS = ("config.yaml", "summary.json", "status.json", "metrics.jsonl")
_STATUS = ("step", "steps", "eta_s", "error")


class AnalysisError(UserError):
    """Runs, tables or figures were asked for in a way that cannot be met."""


def pick(what: str, name: str, known: Mapping[str, T]) -> T:
    """Return what is known by a name; raise `AnalysisError` where nothing is."""
    if name not in known:
        there = ", ".join(known) or "none"
        raise AnalysisError(f"no {what} called {name!r}; there are {there}{suggest(name, known)}")
    return known[name]


def check_attrs(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a data frame of runs; `AnalysisError` where the `attrs` of `load` are gone.

    They say what each score means. Without them tables would hold the paper's numbers alone.
    """
    missing = [
        name for name in ("root", "metrics", "damaged", "unfinished") if name not in frame.attrs
    ]
    if missing:
        raise AnalysisError(
            f"this DataFrame of runs has lost its attrs ({', '.join(missing)}), as after merge or "
            "concat; filter what analysis.load returned, or set frame.attrs = load(...).attrs again"
        )
    return frame


def find(root: str | os.PathLike[str]) -> list[Path]:
    """Return every run folder at or below a folder, sorted; none of hidden folders and links.

    `AnalysisError` if `root` is no folder.
    """
    # A run is called by its folder's name, which `.` and `..` do not say.
    top = Path(root).resolve() if Path(root).name in ("", "..") else Path(root)
    if not top.is_dir():
        raise AnalysisError(f"{root} is not a folder; give the folder of the runs, such as runs")

    def refuse(error: OSError) -> None:
        raise error

    found = []
    for folder, folders, files in os.walk(top, onerror=refuse):
        names = {*folders, *files}
        if not names.isdisjoint(MARKS):
            found.append(Path(folder))
            folders.clear()
        folders[:] = [name for name in folders if not name.startswith(".")]
    return sorted(found)


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
    attrs: dict[Any, Any] = {"root": str(root), "damaged": [], "unfinished": [], "metrics": {}}
    versions: dict[str, int] = {}
    for folder in find(root):
        try:
            row = read_run(folder, attrs["metrics"])
        except Damaged as error:
            about = {"run": shown(folder.name), "path": shown(folder)}
            attrs["damaged"].append({**about, "reason": str(error)})
            continue
        if row.get("status") == "done":
            # Few versions wrote all runs: their key sets are kept once, and a run has a number.
            row["config_keys"] = versions.setdefault(row["config_keys"], len(versions))
            rows.append(row)
        else:
            keys = ("run", "path", "status", *_STATUS)
            attrs["unfinished"].append({key: row[key] for key in keys if key in row})
    frame = typed(rows)
    frame.attrs = {**attrs, "config_keys": [text.split(",") for text in versions]}
    return frame


def read_run(folder: Path, metrics: Metrics | None = None) -> dict[str, Any]:
    """Read one run folder into a flat dict; fill `metrics` with what each metric's name means.

    An unfinished run gives run, path and what its status says. Raises `Damaged` where a file that
    should be there is missing or unreadable.
    """
    run_files.check_path(folder)
    row: dict[str, Any] = {"run": folder.name, "path": str(folder)}
    if (folder / "summary.json").exists():
        row |= _finished(folder)
    elif (folder / "status.json").exists():
        status = run_files.read_json(folder / "status.json")
        row.update((key, status[key]) for key in _STATUS if key in status)
        # A summary is the proof of an end: a heartbeat alone never makes a run finished.
        said = str(status.get("status", "unknown"))
        return row | {"status": "unfinished" if said == "done" else said}
    else:
        raise Damaged("neither summary.json nor status.json")
    if wrong := run_files.fault(row):
        raise Damaged(wrong)
    # A key that a run's version did not know is not the same as one that is null.
    row["config_keys"] = ",".join(sorted(key for key in row if key.startswith("config.")))
    try:
        _derive(row)
    except (RouteError, ScheduleError, BackboneError) as error:
        what = "size" if isinstance(error, BackboneError) else "route"
        raise Damaged(f"its {what} cannot be read ({error})") from None
    own = run_files.own_scores(read_lines(folder / "scores.jsonl"))
    for line in [*own, *run_files.guidance_scales(folder)]:
        # A scale that was measured before the run went on is known of that step.
        if line in own or line["step"] == row["step"]:
            row[f"score.{line['metric']}"] = line["value"]
        if metrics is not None:
            known = {key: line.get(key) for key in ("key", "better", "features", "n")}
            metrics.setdefault(line["metric"], known)
    if own:
        row |= {key: own[0].get(key) for key in ("guidance", "sampler", "reference")}
        row["score_n"] = own[0].get("n")
        row["networks"] = " ".join(
            sorted({str(line["features"]) for line in own if line.get("features")})
        )
    return row


def _finished(folder: Path) -> dict[str, Any]:
    """Return what summary, configuration and environment of a run of this suite say."""
    summary = run_files.read_json(folder / "summary.json")
    row: dict[str, Any] = {"status": str(summary.get("status", "unknown"))}
    row |= {key: summary.get(key) for key in run_files.SUMMARY}
    row |= run_files.read_config(folder / "config.yaml")
    if row.get("config.train.precision") == "auto":
        # What it became there: runs that trained in different precisions are not paired.
        row["config.train.precision"] = str(summary.get("precision", "auto"))
    # What a routed step costs is one stage's; where routes changed, the run has counted a mean.
    mean = _over(summary.get("macs"), row["step"], row.get("config.train.batch"))
    usual = row["macs_routed"]
    if mean and run_files.is_measured(usual) and not math.isclose(mean, usual, rel_tol=1e-3):
        row["macs_routed"], row["macs_routed_no_attention"] = round(mean), None
    # What it ran on: None where env.json is missing or of an older kind.
    about = run_files.json_or_nothing(folder / "env.json")
    packages = about.get("packages")
    torch = packages.get("torch") if isinstance(packages, dict) else None
    values = {"device": about.get("device"), "torch": torch, "commit": about.get("git")}
    return row | {key: value if isinstance(value, str) else None for key, value in values.items()}


def _over(amount: Any, *counts: Any) -> float | None:
    """Return an amount per count, None where one of the numbers is unknown or not above zero."""
    known = all(run_files.is_measured(part) and part > 0 for part in (amount, *counts))
    return amount / math.prod(counts) if known else None


def _derive(row: dict[str, Any]) -> None:
    """Add span, rate, selection, objective and variant to a run's flat row."""
    routes = RouteSchedule.parse(str(row.get("route") or row.get("config.route") or "none"))
    size = parse_size(row["size"])  # of a known depth, too: tables compare sizes by their patch
    routes = routes.resolve(int(row.get("config.backbone.depth") or size.depth))
    route, row["route"] = routes.first, str(routes)  # of several stages the first that routes
    rates = sorted({segment.rate for segment in route.segments})
    row["span"] = "+".join(f"{segment.start}-{segment.end}" for segment in route.segments) or "none"
    row["rate"] = rates[0] if len(rates) == 1 else (0.0 if not rates else float("nan"))
    row["selection"] = row.get("config.routing.selection", "random") if route else None
    row["objective"] = row.get("config.objective.name")
    row["variant"] = variant(row)


def variant(row: dict[str, Any]) -> str:
    """Return the name of the method: dense, TREAD, dropping, MaskDiT, SPRINT, a control."""
    options = {k.removeprefix("config.routing."): v for k, v in row.items()}
    remove = str(options.get("remove", "start"))
    learned = options.get("learned")
    if row["span"] == "none":
        name = "dense"
    elif learned not in (None, "none"):
        # Other names are of runs from before learned routers were removed.
        name = "SPRINT" if learned == "fuse" else f"learned {learned}"
    elif options.get("reinsert") == "none":
        keys = [key for key, value in row.items() if value is not None]
        masked = any(key.startswith("config.backbone.decoder") for key in keys)
        name = "MaskDiT" if masked else "dropping"
    elif remove == "start":
        first = options.get("reinsert") == "sum_input" or row.get("config.train.loss") == "ensemble"
        name = "TREAD v1" if first else "TREAD"
    else:
        late = "delayed removal" if remove.startswith("after") else remove
        name = "no removal (control)" if remove == "never" else late
    return f"{name} + REPA" if row.get("config.train.encoder") not in (None, "none") else name


def typed(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Return a data frame whose columns have one type each: boolean, Int64, float64 or text."""
    names = dict.fromkeys(name for row in rows for name in row)
    plain = [name for name in names if "." not in name]
    scores = [name for name in names if name.startswith("score.")]
    ordered = plain + scores + sorted(name for name in names if name.startswith("config."))
    columns = {name: _column([row.get(name) for row in rows]) for name in ordered}
    return pd.DataFrame(columns, index=range(len(rows)))


def _column(values: list[Any]) -> pd.Series:
    present = [value for value in values if value is not None]
    kinds = {type(value) for value in present}
    if kinds and kinds <= {bool}:
        return pd.Series(values, dtype="boolean")
    if kinds and kinds <= {int} and max(map(abs, present)) < 2**63:
        return pd.Series(values, dtype="Int64")
    if kinds and kinds <= {int, float}:
        return pd.Series([float("nan") if v is None else float(v) for v in values], dtype="float64")
    return pd.Series([None if value is None else str(value) for value in values], dtype="string")


# --- a run's life: steps and multiply-adds on the same rows ---------------------------------------

_SCORE = ("metric", "key", "features", "guidance", "sampler", "reference", "macs_per_sample")
_IDENTITY = (
    "run", "setting", "treatment", "backbone", "size", "data", "scale", "route", "span", "rate",
    "variant", "seed",
)  # fmt: skip


def curves(runs: Runs, columns: Sequence[str] = ("time", "loss", "macs")) -> pd.DataFrame:
    """Return the training curves.

    Args:
        runs: What `analysis.load` returned, or a folder.
        columns: Fields of `metrics.jsonl` beside `step`; one that a run lacks is NaN.

    Returns:
        One row per run and logged step: identity columns, `step` and the columns asked for.
        `attrs["damaged"]` lists runs whose curve cannot be read.
    """

    def curve(folder: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
        for line in read_lines(folder / "metrics.jsonl"):
            if is_number(line.get("step")):
                values = {key: line[key] if _has(line, key) else float("nan") for key in columns}
                yield {"step": int(line["step"]), **values}

    return _collect(runs, curve)


def scores(runs: Runs) -> pd.DataFrame:
    """Return every score of every run with what it had cost to get there.

    Args:
        runs: What `analysis.load` returned, or a folder.

    Returns:
        One row per score, of `scores.jsonl` and of `evaluations/*.json`: identity columns, the
        fields of the score (metric, key, value, n, guidance, ...), `own` (the run's own, under its
        own protocol) and `macs` (training multiply-adds spent by that step, read from the training
        log, linearly between logged steps).
    """

    def of_run(folder: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
        own = [line for line in read_lines(folder / "scores.jsonl") if is_score(line)]
        later = [line for line in evaluations(folder, problems) if is_score(line)]
        # Steps and multiply-adds in the training log, from the origin on.
        log = [line for line in read_lines(folder / "metrics.jsonl") if _has(line, "macs")]
        steps = [0.0, *(float(line["step"]) for line in log)]
        macs = [0.0, *(float(line["macs"]) for line in log)]
        scales = run_files.guidance_scales(folder)
        for place, line in enumerate([*own, *later, *scales]):
            found = {("sample_seed" if key == "seed" else key): v for key, v in line.items()}
            step = found.setdefault("step")
            at = float("nan") if step is None else float(step)
            mine = place < len(own) and run_files.protocol(line) == run_files.protocol(own[0])
            found["own"], found["weights"] = mine or line in scales, line.get("weights") or "ema"
            found["macs"] = _at(at, steps, macs)
            yield found

    frame = _collect(runs, of_run)
    missing = [name for name in _SCORE if name not in frame and not frame.empty]
    return frame.assign(**dict.fromkeys(missing))


def evaluations(folder: Path, problems: list[str]) -> list[dict[str, Any]]:
    """Return what `evaluate.py` wrote beside a run; name the records that cannot be read."""
    lines: list[dict[str, Any]] = []
    for path in sorted((folder / "evaluations").glob("*.json")):
        try:
            record = json_of(path.read_bytes())
            kept = (line for line in record["scores"] if isinstance(line, dict))
            found = [{"weights": record.get("kind"), **line} for line in kept]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            problems.append(f"evaluations/{path.name} cannot be read ({type(error).__name__})")
            continue
        # Two records of one evaluation (other options, same samples) may hold the same line.
        lines += [line for line in found if line not in lines]
    return lines


def _has(line: dict[str, Any], key: str) -> bool:
    return all(is_number(line.get(name)) for name in ("step", key))


def _at(step: float, x: list[float], y: list[float]) -> float:
    """Cost at a step; after the last logged one it goes on at the run's mean cost."""
    if len(x) < 2 or math.isnan(step) or x[-1] <= 0:
        return float("nan")
    return y[-1] * step / x[-1] if step > x[-1] else float(np.interp(step, x, y))


def _collect(
    runs: Runs, read: Callable[[Path, list[str]], Iterator[dict[str, Any]]]
) -> pd.DataFrame:
    """Read every run into rows, put its identity before them, and list what cannot be read."""
    frame = check_attrs(runs) if isinstance(runs, pd.DataFrame) else load(runs)
    rows: list[dict[str, Any]] = []
    damaged: list[dict[str, str]] = []
    for row in frame.to_dict("records"):
        problems: list[str] = []
        try:
            found = list(read(Path(row["path"]), problems))
        except (Damaged, ValueError, TypeError) as error:
            found, problems = [], [str(error)]
        damaged += [{"run": row["run"], "path": row["path"], "reason": text} for text in problems]
        identity = {name: row[name] for name in _IDENTITY if name in row}
        rows += [{**identity, **line} for line in found]
    result = pd.DataFrame(rows) if rows else pd.DataFrame(columns=["run", "step"])
    result.attrs = {"damaged": damaged, "metrics": frame.attrs.get("metrics", {})}
    return result


# --- what is measured on runs, and stored beside them ---------------------------------------------


def with_weights(given: Sequence[Path]) -> list[Path]:
    """Return runs with weights at or below folders, and exported files; name what has none yet.

    `AnalysisError` where an exported file is missing, nothing has weights, or two exported files
    have the same name, under which their results are stored.
    """
    found = dict[Path, list[Path]]()
    for top in given:
        exported = top.suffix == ".safetensors"
        if exported and not top.is_file():
            raise AnalysisError(f"{top} is no file; give run folders or exported .safetensors")
        runs = [top] if exported else find(top)
        found[top] = [r for r in runs if exported or (r / "model.safetensors").is_file()]
    if not any(found.values()):
        raise AnalysisError(f"no run with weights in {given[0]}; give one with model.safetensors")
    for top in (top for top, runs in found.items() if not runs):
        print(f"no weights: {shown(top)}", file=sys.stderr)
    unique = list(dict.fromkeys(run for runs in found.values() for run in runs))
    stems = Counter(run.stem for run in unique if run.suffix == ".safetensors")
    for stem in (stem for stem, count in stems.items() if count > 1):
        raise AnalysisError(
            f"{stems[stem]} of the files are called {stem}.safetensors, and results are stored "
            "under that name in the current folder; measure them one at a time"
        )
    return unique


def result_path(run: Path, name: str) -> Path:
    """Return where to store what was measured on a run: in its folder.

    What was measured on an exported file goes to the current folder: the file may be a bundled one,
    or lie where nothing can be written.
    """
    return run / name if run.is_dir() else Path(f"{run.stem}.{name}")


def read_beside(runs: pd.DataFrame, name: str, read: Callable[[Path], Any]) -> list[Any]:
    """Return what was stored beside runs; a broken file is named and left out."""
    found = []
    for path in (Path(str(folder)) / name for folder in runs.get("path", [])):
        if path.is_file():
            try:
                found.append(read(path))
            except AnalysisError as error:
                warnings.warn(str(error), stacklevel=3)
    return found


def one_by_one(runs: Sequence[Path], measure: Callable[[Path], None]) -> None:
    """Measure every run; one that is damaged is named, and refused after all others are done."""
    failed = []
    for run in runs:
        try:
            run_files.check_path(run)
            measure(run)
        except (UserError, Damaged) as error:
            if len(runs) == 1:
                raise AnalysisError(str(error)) from None
            failed.append(run)
            print(f"damaged: {shown(run.name)}: {error}", file=sys.stderr)
    if failed:
        raise AnalysisError(f"{len(failed)} of {len(runs)} runs could not be measured")


def command(options: argparse.Namespace) -> int:
    """Print every run folder with its state."""
    frame = load(options.runs)
    for row in frame.to_dict("records"):
        print(f"done        {row['run']}  step {row['step']}")
    for item in frame.attrs["unfinished"]:
        step = f"  step {item['step']}" if item.get("step") is not None else ""
        print(f"{item['status']:<11} {item['run']}{step}")
    for item in frame.attrs["damaged"]:
        print(f"damaged     {item['run']}  {item['reason']}")
    unfinished, damaged = len(frame.attrs["unfinished"]), len(frame.attrs["damaged"])
    print(f"{len(frame)} done, {unfinished} unfinished, {damaged} damaged")
    return 0
