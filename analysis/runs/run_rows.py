"""One run folder as a flat row: its configuration, summary, environment and last scores."""

import math
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.runs import run_files
from analysis.runs.run_files import Damaged
from backbones.sizes import BackboneError, parse_size
from routing.route import RouteError, RouteSchedule
from routing.schedule import ScheduleError

STATUS = ("step", "steps", "eta_s", "error")


def read_run(folder: Path) -> dict[str, Any]:
    """Read a run folder into a flat row; the columns are those of `analysis.load`.

    An unfinished run gives run, path and what its status file says. Raises `Damaged` where a file
    is missing or unreadable.
    """
    run_files.check_path(folder)
    row: dict[str, Any] = {"run": folder.name, "path": str(folder)}
    if not (folder / "summary.json").exists():
        return row | _unfinished(folder)
    row |= _finished(folder)
    fault = run_files.fault(row)
    if fault:
        raise Damaged(fault)
    # A key that a run's version did not know is not the same as one that is null.
    row["config_keys"] = ",".join(sorted(filter(lambda key: key.startswith("config."), row)))
    try:
        _add_route_columns(row)
    except (RouteError, ScheduleError) as error:
        raise Damaged(f"its route cannot be read ({error})") from None
    except BackboneError as error:
        raise Damaged(f"its size cannot be read ({error})") from None
    _add_scores(row, folder)
    return row


def _unfinished(folder: Path) -> dict[str, Any]:
    path = folder / "status.json"
    if not path.exists():
        raise Damaged("neither summary.json nor status.json")
    status = run_files.read_json(path)
    row = {}
    for key in STATUS:
        if key in status:
            row[key] = status[key]
    state = str(status.get("status", "unknown"))
    # Only a summary proves that a run has finished; a heartbeat that says so does not.
    row["status"] = "unfinished" if state == "done" else state
    return row


def _finished(folder: Path) -> dict[str, Any]:
    """Return what summary, configuration and environment of a run say."""
    summary = run_files.read_json(folder / "summary.json")
    row: dict[str, Any] = {"status": str(summary.get("status", "unknown"))}
    for key in run_files.SUMMARY:
        row[key] = summary.get(key)
    row["data_fingerprint"] = run_files.data_fingerprint(folder, summary)
    row |= run_files.read_config(folder / "config.yaml")
    if row.get("config.train.precision") == "auto":
        # The resolved precision: runs that trained in different precisions are not paired.
        row["config.train.precision"] = str(summary.get("precision", "auto"))
    # Where the route changes during training, the run has counted the mean cost of a step.
    mean = _quotient(summary.get("macs"), row["step"], row.get("config.train.batch"))
    routed = row["macs_routed"]
    if mean and run_files.is_measured(routed) and not math.isclose(mean, routed, rel_tol=1e-3):
        row["macs_routed"], row["macs_routed_no_attention"] = round(mean), None
    # None where env.json is missing or of an older format.
    environment = run_files.read_environment(folder)
    for column, key in (("device", "device"), ("torch", "torch"), ("commit", "git")):
        value = environment.get(key)
        row[column] = value if isinstance(value, str) else None
    return row


def _quotient(amount: Any, *divisors: Any) -> float | None:
    """Return amount / product of the divisors; None where a number is unknown or not positive."""
    for number in (amount, *divisors):
        if not run_files.is_measured(number) or number <= 0:
            return None
    return float(amount / math.prod(divisors))


def _add_route_columns(row: dict[str, Any]) -> None:
    """Add span, rate, selection, objective and method."""
    schedule = RouteSchedule.parse(str(row.get("route") or row.get("config.route") or "none"))
    size = parse_size(row["size"])  # even where the depth is known: tables compare patch sizes
    schedule = schedule.resolve(int(row.get("config.backbone.depth") or size.depth))
    route = schedule.first  # of several stages the first that routes
    spans, rates = [], set()
    for segment in route.segments:
        spans.append(f"{segment.start}-{segment.end}")
        rates.add(segment.rate)
    row["route"] = str(schedule)
    row["span"] = "+".join(spans) or "none"
    if len(rates) == 1:
        row["rate"] = rates.pop()
    else:
        row["rate"] = float("nan") if rates else 0.0
    row["selection"] = row.get("config.routing.selection", "random") if route else None
    row["objective"] = row.get("config.objective.name")
    row["method"] = method(row)


def method(row: dict[str, Any]) -> str:
    """Return the name of the method: dense, TREAD, dropping, MaskDiT, SPRINT, a control."""
    name = _routing_method(row)
    encoder = row.get("config.train.encoder")
    if encoder in (None, "none"):
        return name
    return f"{name} + SRA" if encoder == "ema" else f"{name} + REPA"


def _routing_method(row: dict[str, Any]) -> str:
    learned = row.get("config.routing.learned")
    reinsert = row.get("config.routing.reinsert")
    remove = str(row.get("config.routing.remove", "start"))
    if row["span"] == "none":
        return "dense"
    if learned == "fuse":
        return "SPRINT"
    if learned not in (None, "none"):
        # Runs from before learned routers were removed.
        return f"learned {learned}"
    if reinsert == "none":
        return "MaskDiT" if _has_decoder(row) else "dropping"
    if remove == "never":
        return "no removal (control)"
    if remove.startswith("after"):
        return "delayed removal"
    if remove != "start":
        return remove
    is_first_version = reinsert == "sum_input" or row.get("config.train.loss") == "ensemble"
    return "TREAD v1" if is_first_version else "TREAD"


def _has_decoder(row: dict[str, Any]) -> bool:
    decoder = [row[key] for key in row if key.startswith("config.backbone.decoder")]
    return any(value is not None for value in decoder)


def _add_scores(row: dict[str, Any], folder: Path) -> None:
    """Add the run's last own scores and their protocol."""
    own = run_files.own_scores(run_files.read_scores(folder / "scores.jsonl"))
    scores = run_files.last_scores(own)
    networks = set()
    for score in scores:
        row[f"score.{score['metric']}"] = score["value"]
        if score.get("features"):
            networks.add(str(score["features"]))
    for scale in run_files.guidance_scales(folder):
        # The run may have been trained further after its scale was measured.
        if scale["step"] == row["step"]:
            row[f"score.{scale['metric']}"] = scale["value"]
    if scores:
        first = scores[0]
        row |= {key: first.get(key) for key in ("guidance", "sampler", "reference")}
        row["score_n"] = first.get("n")
        row["networks"] = " ".join(sorted(networks))


def typed(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Return a data frame whose columns have one type each: boolean, Int64, float64 or text."""
    names: dict[str, None] = {}
    for row in rows:
        names.update(dict.fromkeys(row))
    columns = {}
    for name in sorted(names, key=_column_order):
        columns[name] = _column([row.get(name) for row in rows])
    return pd.DataFrame(columns, index=range(len(rows)))


def _column_order(name: str) -> tuple[int, str]:
    """Sort key: plain columns in their order, then scores in theirs, then the configuration."""
    if name.startswith("config."):
        return 2, name
    return (1 if name.startswith("score.") else 0), ""


def _column(values: list[Any]) -> pd.Series:
    present = [value for value in values if value is not None]
    kinds = set(map(type, present))
    if kinds and kinds <= {bool}:
        return pd.Series(values, dtype="boolean")
    if kinds and kinds <= {int} and max(map(abs, present)) < 2**63:
        return pd.Series(values, dtype="Int64")
    if kinds and kinds <= {int, float}:
        return pd.Series([float("nan") if v is None else float(v) for v in values], dtype="float64")
    return pd.Series([None if v is None else str(v) for v in values], dtype="string")
