"""Options of a cluster file, and those of them that a grid may change for a stage or a cell.

docs/cluster.md lists the keys.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from backbones.validation import fields_of, show
from routing.errors import require
from sweeps import SweepError

SBATCH_OPTIONS = ("partition", "account", "qos", "constraint", "exclude")
# sbatch options that the sweep itself sets, and those that have a key of their own here.
_SET_BY_SWEEP = (
    "array", "chdir", "error", "job-name", "open-mode", "output", "requeue", "signal", "wrap",
    "nodes", "ntasks", "ntasks-per-node", "time",
)  # fmt: skip
_FOREIGN_OPTIONS = "sbatch options that the sweep does not set, such as {mail-type: END}"


@dataclass(frozen=True)
class Characters:
    """The pattern that every item of a value must match, and what to call it in a message."""

    pattern: str
    expected: str

    def match(self, value: Any) -> bool:
        """Return whether a text, or every item of a list, matches."""
        items = value if isinstance(value, list) else [value]
        return all(re.fullmatch(self.pattern, str(item), re.ASCII) for item in items)


_PRINTABLE = r"[^\x00-\x1f\x7f]+"
_SBATCH = Characters(r"[\w.,:&|*@\-\[\]()/ +=%!?~]+", "no characters but those of sbatch options")
SbatchText = Annotated[str | None, _SBATCH, "sbatch's own option"]
Count = Annotated[int, Ge(1), Le(99_999)]


@dataclass(frozen=True)
class RunResources:
    """What one run gets; the `cluster` section of a grid's stage or cell may change these keys.

    `gpus` and `tasks` are per node; a task is one process of the run.
    """

    partition: SbatchText = None
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
    runs_per_gpu: Annotated[int, Ge(1), Le(64), "runs that share one GPU"] = 1
    cpus: Annotated[Count, "CPUs per process"] = 1
    memory_gb: Annotated[float | None, Gt(0), "memory per node"] = None
    time: Annotated[str | int, _SBATCH, "time limit of a job"] = "4:00:00"
    signal_s: Annotated[int, Ge(5), Le(99_999), "seconds before the limit at which a run saves"] = (
        180
    )

    def check_consistency(self) -> None:
        """Refuse characters and combinations that a job cannot have."""
        options: type = type(self)
        for name, option in fields_of(options).items():
            value = getattr(self, name)
            for constraint in option.metadata:
                if value is not None and isinstance(constraint, Characters):
                    problem = f"{name}={_shorten(value)}: expected {constraint.expected}"
                    require(constraint.match(value), problem, SweepError)
        minutes(self.time)

    @property
    def gpu_count(self) -> int:
        """GPUs per node, of whatever type."""
        return int(str(self.gpus).rpartition(":")[2])

    def describe(self) -> str:
        """Return what a run gets in words: `2 GPUs, 80 GB, 8 CPUs, 4:00:00, partition long`."""
        gpus = f"{self.gpus} GPU{'s' if self.gpu_count > 1 else ''}"
        if self.runs_per_gpu > 1:
            gpus = f"{gpus} shared by {self.runs_per_gpu} runs"
        texts = [gpus if self.gpu_count else "no GPU"]
        if self.memory_gb is not None:
            texts.append(f"{self.memory_gb:g} GB")
        cpus = self.cpus * self.tasks
        texts += [f"{cpus} CPU{'s' if cpus > 1 else ''}", str(self.time)]
        if self.nodes > 1:
            texts = [f"{self.nodes} nodes of {texts[0]}", *texts[1:]]
        for option in ("partition", "qos", "constraint", "exclude"):
            if getattr(self, option):
                texts.append(f"{option} {getattr(self, option)}")
        return ", ".join(texts)


@dataclass(frozen=True, kw_only=True)
class Resources(RunResources):
    """The options of a cluster file: what one run gets, and how many run at once."""

    name: Annotated[str, "name or path of the file"]
    kind: Annotated[Literal["slurm", "local", "debug"], "Slurm, a pool here, or this process"]
    account: SbatchText = None
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
    fixed: Annotated[list[str], "keys that a grid does not change, since they were typed"] = field(
        default_factory=list
    )

    def check_consistency(self) -> None:
        """Refuse what a job cannot have, options of sbatch included."""
        super().check_consistency()
        _check_extra(self.extra)
        processes = self.nodes * self.tasks
        if self.kind != "slurm":
            for key in ("setup", "srun", "python"):
                problem = f"{key} with kind={self.kind}: expected only with kind=slurm"
                require(not getattr(self, key), problem, SweepError)
            require(
                processes == 1,
                f"nodes={self.nodes}, tasks={self.tasks} with kind={self.kind}: a run has one "
                "process; for several on this machine use torchrun experiments/run.py, for several "
                "nodes cluster=slurm",
                SweepError,
            )
        require(
            minutes(self.time) * 60 > self.signal_s,
            f"signal_s={self.signal_s}: expected less than time={self.time}, since a run would "
            "be stopped as it starts",
            SweepError,
        )
        require(
            self.runs_per_gpu == 1 or self.kind == "debug" or self.gpu_count == processes == 1,
            f"runs_per_gpu={self.runs_per_gpu} with gpus={self.gpus}, nodes={self.nodes}, "
            f"tasks={self.tasks}: expected gpus=1, nodes=1 and tasks=1, since the runs share "
            "one GPU",
            SweepError,
        )

    @property
    def slurm_cluster(self) -> str:
        """Cluster of a multi-cluster Slurm that the jobs go to; "" for the default one."""
        return str(self.extra.get("clusters") or "")


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


def _check_extra(extra: Mapping[str, Any]) -> None:
    """Refuse options in `extra` that the sweep sets itself, or that are none of sbatch."""
    for option, value in extra.items():
        is_name = re.fullmatch(r"[a-z][a-z0-9-]*", option, re.ASCII)
        require(
            is_name and _SBATCH.match(str(value)) and option not in _SET_BY_SWEEP,
            f"extra={{{option}: {_shorten(value)}}}: expected {_FOREIGN_OPTIONS}",
            SweepError,
        )
        # sbatch takes an abbreviation for the option that it begins.
        for full_name in (*_SET_BY_SWEEP, "clusters"):
            require(
                option == full_name or not full_name.startswith(option),
                f"extra={{{option}: ...}} is short for {full_name}: expected {_FOREIGN_OPTIONS}, "
                "by their full names",
                SweepError,
            )
    name = extra.get("clusters")
    require(
        name is None or (isinstance(name, str) and is_slurm_cluster(name)),
        f"extra={{clusters: {name}}}: expected the name of one cluster, since job ids are "
        "unique within a cluster only",
        SweepError,
    )


def _shorten(value: object) -> str:
    text = show(value)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 200 else f"{text[:80]}... ({len(text)} characters)"
