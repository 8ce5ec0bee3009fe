"""Where a sweep runs: one YAML file per cluster (by name or path), and `cluster.KEY=VALUE`.

The file has everything that a Slurm site needs (partition, account, time, GPUs, constraint);
`extra` passes any other sbatch option through. docs/cluster.md lists the keys.
"""

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from backbones.parsing import yaml_of
from backbones.validation import fields_of, validate
from experiments.runtime.memory import visible_gpus
from routing.errors import UserError, require
from sweeps import SweepError
from sweeps.plan.config_files import read_yaml
from sweeps.store.folder import JobBatch
from sweeps.store.planned_run import PlannedRun
from sweeps.store.resource_options import SBATCH_OPTIONS, Resources, RunResources, is_slurm_cluster

FOLDER = Path(__file__).parents[1] / "resources"
_NUMBERS = ("memory_gb", "tflops")
# What a pool on this machine takes from a grid's `cluster`; `debug` takes nothing.
_POOL_KEYS = ("gpus", "runs_per_gpu")


def load(name: str, scale: str = "tiny", overrides: Mapping[str, str] | None = None) -> Resources:
    """Read a cluster file by name or path, with its section for a scale and `cluster.KEY=VALUE`.

    Raises:
        SweepError: There is no such file, or a key or value is invalid.
    """
    # Texts stay as they are written: an account 0123 is not 83.
    path, raw = read_yaml("cluster", name, FOLDER, numbers_as_text=True)
    # A user's file is shown by its path.
    name = str(path.resolve()) if path.parent != FOLDER else path.stem
    scales = raw.get("scales") or {}
    section = scales.get(scale) if isinstance(scales, dict) else None
    values = {**raw, **section} if isinstance(section, dict) else raw
    require("fixed" not in values, f"unknown key cluster.fixed (cluster={name})", SweepError)
    return _build(name, values, overrides or {})


def check_cluster(section: Any) -> None:
    """Refuse what a `cluster` section of a stage or cell cannot have: anything but resources."""
    if isinstance(section, Mapping):
        for key in section:
            is_foreign = key in fields_of(Resources) and key not in fields_of(RunResources)
            require(not is_foreign, f"cluster.{key} belongs to the cluster file", SweepError)
        section = set_values(RunResources, section)
    validate(RunResources, {} if section is None else section, "cluster.")


def for_run(resources: Resources, changes: Mapping[str, Any]) -> Resources:
    """Return the resources of a run whose stage or cell has `cluster` keys of its own.

    Keys that were typed (`fixed`) stay as typed. Where a run has several GPUs or none, it shares
    none. A pool takes the GPUs only, and `debug` nothing.

    Raises:
        UserError: A key or value is invalid, or does not fit the others.
    """
    values = set_values(RunResources, changes)
    own: RunResources = validate(RunResources, values, "cluster.")
    for key in ignored_keys(resources, values):
        del values[key]
    values = {key: value for key, value in values.items() if key not in resources.fixed}
    if not values:
        return resources
    if "gpus" in values and own.gpu_count != 1:
        values.setdefault("runs_per_gpu", 1)
    merged = {**dataclasses.asdict(resources), **values}
    result: Resources = validate(Resources, merged, "cluster.")
    return result


def set_values(options: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that are not null, each with the type that it takes in `options`."""
    results = {}
    for key, value in values.items():
        if key not in fields_of(options):
            results[key] = value  # refused by `validate`, also where it is null
        elif value is not None:
            results[key] = _read_number(key, value)
    return results


def ignored_keys(resources: Resources, changes: Iterable[str]) -> list[str]:
    """Return the keys of a grid's `cluster` that have no effect with this kind of cluster."""
    if resources.kind == "slurm":
        return []
    accepted = _POOL_KEYS if resources.kind == "local" else ()
    return [key for key in changes if key not in accepted]


def ignored_lines(resources: Resources, runs: Iterable[PlannedRun]) -> list[str]:
    """Return the line that says what of the grid's `cluster` has no effect; [] for nothing."""
    texts: dict[str, None] = {}
    for run in runs:
        for key in ignored_keys(resources, run.cluster):
            texts[f"{key}={run.cluster[key]}"] = None
    return [f"cluster={resources.name} ignores {', '.join(texts)} of the grid"] if texts else []


def by_run(resources: Resources, runs: Sequence[PlannedRun]) -> dict[str, Resources]:
    """Return the resources of each run by its name.

    Raises:
        SweepError: The message names the run.
    """
    results = {}
    for run in runs:
        try:
            results[run.name] = for_run(resources, run.cluster)
        except UserError as error:
            raise SweepError(f"{run.label or run.name}: {error}") from None
    return results


def describe_stored(batch: JobBatch | None) -> str:
    """Return in words what each run of a submission got; "" where the record is damaged."""
    values = dict(batch.resources) if batch is not None else {}
    values = {key: values[key] for key in fields_of(RunResources) if values.get(key) is not None}
    with contextlib.suppress(UserError):
        own: RunResources = validate(RunResources, values)
        return own.describe() if values else ""
    return ""


def _build(name: str, values: Mapping[str, Any], typed: Mapping[str, str]) -> Resources:
    """Validate resources; a typed throttle also limits the workers of a pool."""
    for key in ("scales", "name", "fixed"):
        require(key not in typed, f"cluster.{key} belongs to the file", SweepError)
    merged = dict(values)
    for key, text in typed.items():
        is_text = key in (*SBATCH_OPTIONS, "time", "python")
        merged[key] = text if is_text else yaml_of(text, f"cluster.{key}={text}", True)
    options = {**set_values(Resources, merged), "name": name}
    options["fixed"] = sorted(typed)
    try:
        resources: Resources = validate(Resources, options, "cluster.")
        resources = _with_environment_cluster(resources)
    except UserError as error:
        raise SweepError(f"{error} (cluster={name})") from None
    if resources.kind != "local":
        return resources
    workers = resources.workers
    if resources.runs_per_gpu > 1 and "workers" not in options:
        workers = max(1, resources.runs_per_gpu * len(visible_gpus()))
    if "throttle" in typed:
        workers = min(workers, resources.throttle)
    return dataclasses.replace(resources, workers=workers)


def _read_number(key: str, value: Any) -> Any:
    """Convert a text to the number that its key takes, and a number to the text that it takes."""
    if key in SBATCH_OPTIONS and type(value) is int:
        return str(value)  # as in `account: 12345`
    if isinstance(value, str) and key in _NUMBERS:
        is_number = re.fullmatch(r"\d*\.?\d*(e[+-]?\d{1,2})?", value) and re.match(r"\.?\d", value)
        return float(value) if is_number else value
    expects_integer = key == "gpus" or fields_of(Resources)[key].type is int
    if isinstance(value, str) and expects_integer and re.fullmatch(r"0|[1-9][0-9]{0,17}", value):
        return int(value)
    return value


def _with_environment_cluster(resources: Resources) -> Resources:
    """Store the cluster that sbatch would take from the environment, for later calls of Slurm."""
    if resources.kind != "slurm" or resources.slurm_cluster:
        return resources
    for variable in ("SBATCH_CLUSTERS", "SLURM_CLUSTERS"):
        name = os.environ.get(variable)
        if not name:
            continue
        require(
            is_slurm_cluster(name),
            f"{variable}={name}: expected the name of one cluster; unset it, or choose one "
            "with cluster.extra={clusters: NAME}",
            SweepError,
        )
        return dataclasses.replace(resources, extra={**resources.extra, "clusters": name})
    return resources
