"""Where a sweep runs: one YAML file per cluster (by name or path), and `cluster.KEY=VALUE`.

The file has everything that a Slurm site needs (partition, account, time, GPUs, constraint);
`extra` passes any other sbatch option through. docs/cluster.md lists the keys.
"""

import dataclasses
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from backbones.parsing import yaml_of
from backbones.validation import fields_of, show, validate
from routing.errors import UserError
from sweeps import SweepError, require
from sweeps.config_files import read_yaml

FOLDER = Path(__file__).parent / "resources"
SBATCH_OPTIONS = ("partition", "account", "qos", "constraint", "exclude")
# sbatch options that the sweep itself sets, and those that have a key of their own here.
_SET_BY_SWEEP = (
    "array", "chdir", "error", "job-name", "open-mode", "output", "requeue", "signal", "wrap",
    "nodes", "ntasks", "ntasks-per-node", "time",
)  # fmt: skip
_FOREIGN_OPTIONS = "sbatch options that the sweep does not set, such as {mail-type: END}"
# Keys whose values a job executes.
_CODE_KEYS = ("setup", "srun", "python")
# sbatch options that only request resources, or say when a job runs and whom it notifies. Others
# are not taken from a folder of runs: export (LD_PRELOAD=...), container and plugins run code.
_RETRY_EXTRA = {
    "begin", "clusters", "comment", "contiguous", "core-spec", "cores-per-socket", "cpu-freq",
    "cpus-per-gpu", "cpus-per-task", "deadline", "delay-boot", "dependency", "distribution",
    "exclusive", "gpu-bind", "gpu-freq", "gpus", "gpus-per-node", "gpus-per-socket",
    "gpus-per-task", "gres", "gres-flags", "hint", "hold", "licenses", "mail-type", "mem",
    "mem-per-cpu", "mem-per-gpu", "mincpus", "nice", "nodelist", "no-kill", "overcommit",
    "oversubscribe", "prefer", "priority", "reservation", "sockets-per-node", "spread-job",
    "switches", "thread-spec", "threads-per-core", "time-min", "tmp", "use-min-nodes",
    "wait-all-nodes", "wckey",
}  # fmt: skip


@dataclass(frozen=True)
class Characters:
    """The pattern that every item of a value must match, and what to call it in a message."""

    pattern: str
    expected: str

    def match(self, value: Any) -> bool:
        """Return whether a text, or every item of a list, matches."""
        items = value if isinstance(value, list) else [value]
        return all(re.fullmatch(self.pattern, str(item), re.ASCII) for item in items)


_SBATCH_CHARACTERS = r"[\w.,:&|*@\-\[\]()/ +=%!?~]+"
_PRINTABLE = r"[^\x00-\x1f\x7f]+"
_SBATCH = Characters(_SBATCH_CHARACTERS, "no characters but those of sbatch options")
SbatchText = Annotated[str | None, _SBATCH, "sbatch's own option"]
Count = Annotated[int, Ge(1), Le(99_999)]


@dataclass(frozen=True)
class Resources:
    """What one run gets. `gpus` and `tasks` are per node; a task is one process of the run."""

    name: Annotated[str, "name or path of the file"]
    kind: Annotated[Literal["slurm", "local", "debug"], "Slurm, a pool here, or this process"]
    partition: SbatchText = None
    account: SbatchText = None
    qos: SbatchText = None
    constraint: SbatchText = None
    exclude: SbatchText = None
    nodes: Annotated[Count, "nodes of a run"] = 1
    tasks: Annotated[Count, "processes per node"] = 1
    gpus: Annotated[
        int | str,
        Characters(
            r"([A-Za-z][\w.-]*:)?(0|[1-9]\d{0,3})", "a whole number or TYPE:NUMBER, such as a100:2"
        ),
        "GPUs per node",
    ] = 0
    cpus: Annotated[Count, "CPUs per process"] = 1
    memory_gb: Annotated[float | None, Gt(0), "memory per node"] = None
    time: Annotated[str | int, _SBATCH, "time limit of a job"] = "4:00:00"
    signal_s: Annotated[int, Ge(5), Le(99_999), "how long before the limit a run is told"] = 180
    throttle: Annotated[Count, "runs at once on Slurm"] = 16
    workers: Annotated[Count, "runs at once in a pool"] = 1
    tflops: Annotated[float | None, Gt(0), "what one GPU reaches in training"] = None
    setup: Annotated[
        list[str],
        Characters(
            _PRINTABLE, "a list of lines such as [module load cuda/12.4]; quote one with ': ' in it"
        ),
        "lines of the job's script before the run",
    ] = field(default_factory=list)
    srun: Annotated[
        list[str],
        Characters("-" + _PRINTABLE, "a list of options, such as [--NAME=VALUE]"),
        "further options of srun",
    ] = field(default_factory=list)
    python: Annotated[
        str | None,
        Characters(_PRINTABLE, "the command that starts Python, such as apptainer exec IMAGE.sif"),
        "what starts Python in the job",
    ] = None
    extra: Annotated[
        dict[str, str | int | float | bool | None], "any other long option of sbatch"
    ] = field(default_factory=dict)
    scales: Annotated[dict[str, dict[str, Any] | None], "changes at one scale"] = field(
        default_factory=dict
    )

    def check_consistency(self) -> None:
        """Refuse characters and combinations that a job cannot have."""
        problem = next(self._problems(), "")
        require(not problem, problem)

    def _problems(self) -> Iterator[str]:
        for name, option in fields_of(Resources).items():
            value = getattr(self, name)
            for constraint in option.metadata:
                if value is None or not isinstance(constraint, Characters):
                    continue
                if not constraint.match(value):
                    yield f"{name}={_shorten(value)}: expected {constraint.expected}"
        yield from _extra_problems(self.extra)
        code = [key for key in _CODE_KEYS if getattr(self, key)]
        if self.kind != "slurm" and code:
            yield f"{code[0]} with kind={self.kind}: expected only with kind=slurm"
        if self.kind != "slurm" and self.nodes * self.tasks > 1:
            yield (
                f"nodes={self.nodes}, tasks={self.tasks} with kind={self.kind}: a run has one "
                "process; for several on this machine use torchrun experiments/run.py, for several "
                "nodes cluster=slurm"
            )
        if minutes(self.time) * 60 <= self.signal_s:
            yield (
                f"signal_s={self.signal_s}: expected less than time={self.time}, since a run would "
                "be told to stop as it starts"
            )

    @property
    def gpu_count(self) -> int:
        """GPUs per node, of whatever type."""
        return int(str(self.gpus).rpartition(":")[2])

    @property
    def slurm_cluster(self) -> str:
        """Cluster of a multi-cluster Slurm that the jobs go to; "" for the default one."""
        return str(self.extra.get("clusters") or "")


def load(name: str, scale: str = "tiny", overrides: Mapping[str, str] | None = None) -> Resources:
    """Read a cluster file by name or path, with its section for a scale and `cluster.KEY=VALUE`.

    Raises:
        SweepError: There is no such file, or a key or value is invalid.
    """
    # Texts stay as they are written: an account 0123 is not 83.
    path, raw = read_yaml("cluster", name, FOLDER, numbers_as_text=True)
    # A user's file is stored by its path, so that a retry from another folder has it.
    name = str(path.resolve()) if path.parent != FOLDER else path.stem
    scales = raw.get("scales") or {}
    section = scales.get(scale) if isinstance(scales, dict) else None
    values = {**raw, **section} if isinstance(section, dict) else raw
    return _build(name, values, overrides or {})


def resume(values: Mapping[str, Any], overrides: Mapping[str, str]) -> Resources:
    """Return the resources of an earlier submission, with `cluster.KEY=VALUE` overrides.

    Raises:
        SweepError: It had lines of a shell, or sbatch options that may run code: a folder of runs
            may come from anywhere, so nothing in it is executed.
    """
    refused = untrusted_keys(values)
    if refused:
        name = str(values.get("name"))
        name = name if name.isprintable() else repr(name)  # no control codes for the terminal
        raise SweepError(
            f"the last launch had cluster.{refused[0]}, and what may run code is not taken from a "
            f"folder of runs: type cluster= again (it was cluster={name})"
        )
    options = {key: value for key, value in values.items() if key in fields_of(Resources)}
    return _build(str(options.pop("name", "")), options, overrides)


def untrusted_keys(values: Mapping[str, Any]) -> list[str]:
    """Return the keys of resources that may run code in a job, or contain a user's secrets."""
    keys = [key for key in _CODE_KEYS if values.get(key)]
    extra = values.get("extra")
    for option in extra if isinstance(extra, dict) else ():
        if option not in _RETRY_EXTRA:
            keys.append(f"extra={{{option}: ...}}")
    return keys


def is_slurm_cluster(name: str) -> bool:
    """Return whether a text can name one cluster: `a,b` and `all` are several."""
    return re.fullmatch(r"[A-Za-z0-9_][\w.-]*", name, re.ASCII) is not None and name != "all"


def minutes(time: str | int) -> int:
    """Return the minutes of a Slurm time: `90`, `4:00:00`, `2-00:00:00`, `1-12`."""
    form = re.compile(r"(?:(\d{1,6})-)?(\d{1,6})(?::(\d{1,6}))?(?::(\d{1,6}))?", re.ASCII)
    match = form.fullmatch(str(time).strip())
    if match is None:
        raise SweepError(
            f"time={time}: expected minutes, hours:minutes:seconds or days-hours:minutes:seconds"
        )
    days, *parts = match.groups()
    hours, mins, seconds = (int(part or 0) for part in parts)
    if days is None and parts[2] is None:
        hours, mins, seconds = 0, hours, mins  # minutes, or minutes:seconds
    total = ((int(days or 0) * 24 + hours) * 60 + mins) * 60 + seconds
    return max(1, math.ceil(total / 60))


def _build(name: str, values: Mapping[str, Any], typed: Mapping[str, str]) -> Resources:
    """Validate resources; a typed throttle also limits the workers of a pool."""
    require(
        not {"scales", "name"} & typed.keys(), "cluster.scales and cluster.name belong to the file"
    )
    merged = dict(values)
    for key, text in typed.items():
        is_text = key in (*SBATCH_OPTIONS, "time", "python")
        merged[key] = text if is_text else yaml_of(text, f"cluster.{key}={text}", True)
    options: dict[str, Any] = {}
    for key, value in merged.items():
        if key not in fields_of(Resources):
            options[key] = value  # refused below, also where it is null
        elif value is not None:
            options[key] = _read_number(key, value)
    options["name"] = name
    try:
        resources: Resources = validate(Resources, options)
        resources = _with_environment_cluster(resources)
    except UserError as error:
        raise SweepError(f"cluster {name}: {error}") from None
    if resources.kind == "local" and "throttle" in typed:
        workers = min(resources.workers, resources.throttle)
        return dataclasses.replace(resources, workers=workers)
    return resources


def _read_number(key: str, value: Any) -> Any:
    """Convert a text to the number that its key takes, and a number to the text that it takes."""
    if key in SBATCH_OPTIONS and type(value) is int:
        return str(value)  # as in `account: 12345`
    if isinstance(value, str) and key in ("memory_gb", "tflops"):
        is_number = re.fullmatch(r"\d*\.?\d*(e[+-]?\d{1,2})?", value) and re.match(r"\.?\d", value)
        return float(value) if is_number else value
    expects_integer = key == "gpus" or fields_of(Resources)[key].type is int
    if isinstance(value, str) and expects_integer and re.fullmatch(r"0|[1-9][0-9]{0,17}", value):
        return int(value)
    return value


def _extra_problems(extra: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with options in `extra`."""
    for option, value in extra.items():
        plain = re.fullmatch(r"[a-z][a-z0-9-]*", option, re.ASCII) and re.fullmatch(
            _SBATCH_CHARACTERS, str(value), re.ASCII
        )
        if not plain or option in _SET_BY_SWEEP:
            yield f"extra={{{option}: {_shorten(value)}}}: expected {_FOREIGN_OPTIONS}"
        # sbatch takes an abbreviation for the option that it begins.
        for full_name in (*_SET_BY_SWEEP, "clusters"):
            if full_name.startswith(option) and option != full_name:
                yield (
                    f"extra={{{option}: ...}} is short for {full_name}: expected "
                    f"{_FOREIGN_OPTIONS}, by their full names"
                )
    name = extra.get("clusters")
    if name is not None and not (isinstance(name, str) and is_slurm_cluster(name)):
        yield (
            f"extra={{clusters: {name}}}: expected the name of one cluster, since job ids are "
            "unique within a cluster only"
        )


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
        )
        return dataclasses.replace(resources, extra={**resources.extra, "clusters": name})
    return resources


def _shorten(value: object) -> str:
    text = show(value)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 200 else f"{text[:80]}... ({len(text)} characters)"
