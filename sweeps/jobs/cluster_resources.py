"""Where a sweep runs: one YAML file per cluster (by name or path), `cluster.KEY=...`.

Everything a Slurm site needs (partition, account, time, GPUs, constraint) stands in that one file;
`extra` passes any other sbatch option through. docs/cluster.md lists the keys.
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_type_hints

from experiments.runtime.parsing import yaml_of
from routing.errors import one_of
from sweeps import SweepError
from sweeps.planning.grid import named_yaml
from sweeps.planning.overrides import fits

FOLDER = Path(__file__).parents[1] / "resources"


@dataclass(frozen=True)
class Resources:
    """What one run gets. `gpus` and `tasks` are per node; a task is one process of the run.

    `kind` is slurm, local or debug. `setup` are lines of the job's script before the run, `srun`
    further options of srun, `python` the command that starts Python in the job.
    """

    name: str
    kind: str
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    nodes: int = 1
    tasks: int = 1
    gpus: int | str = 0  # a number, or Slurm's TYPE:NUMBER
    cpus: int = 1
    memory_gb: float | None = None
    time: str | int = "4:00:00"
    signal_s: int = 180
    throttle: int = 16
    workers: int = 1
    tflops: float | None = None
    setup: list[str] = field(default_factory=list)
    srun: list[str] = field(default_factory=list)
    python: str | None = None
    extra: dict[str, str | int | float | bool | None] = field(default_factory=dict)
    scales: dict[str, Any] = field(default_factory=dict)

    @property
    def gpu_count(self) -> int:
        """GPUs per node, of whatever type."""
        return int(str(self.gpus).rpartition(":")[2])

    @property
    def slurm_cluster(self) -> str:
        """The cluster of a multi-cluster Slurm that the jobs go to; "" for the default one."""
        return str(self.extra.get("clusters") or "")


def is_slurm_cluster(name: str) -> bool:
    """Return whether a text can be the name of one cluster: `a,b` and `all` are several."""
    return re.fullmatch(r"[A-Za-z0-9_][\w.-]*", name, re.ASCII) is not None and name != "all"


def load(name: str, scale: str = "tiny", overrides: Mapping[str, str] | None = None) -> Resources:
    """Read resources (name or path), a scale's section, `cluster.KEY=VALUE`; or `SweepError`."""
    # Numbers are read by the keys that want them: an account 0123 is no 83.
    path, raw = named_yaml("cluster", name, FOLDER, "kind, partition, time", numbers_as_text=True)
    scales = raw.get("scales") or {}
    section = scales.get(scale) or {} if isinstance(scales, dict) else None
    if not isinstance(section, dict):
        raise SweepError(f"resources {path.stem}: scales must map tiny, small, paper to mappings")
    # A file of the user's is remembered by its place, for a retry from another folder.
    name = str(path.resolve()) if path.parent != FOLDER else path.stem
    return _checked(name, {**raw, **section}, overrides or {})


def again(values: Mapping[str, Any], overrides: Mapping[str, str]) -> Resources:
    """Return the resources of an earlier submission, with `cluster.KEY=VALUE` overrides.

    `SweepError` if it had lines of a shell, or options of sbatch that may run code or change what
    a job runs: a folder of runs, which may come from anywhere, names no code.
    """
    if refused := untrusted_keys(values):
        name = str(values.get("name"))
        name = name if name.isprintable() else repr(name)  # nothing that a terminal acts on
        raise SweepError(
            f"the last launch had cluster.{refused[0]}, and what may run code is not taken from a "
            f"folder of runs: type cluster= again (it was cluster={name})"
        )
    shapes = get_type_hints(Resources)
    kept = {key: value for key, value in values.items() if key in shapes}
    return _checked(str(kept.pop("name", "")), kept, overrides)


def untrusted_keys(values: Mapping[str, Any]) -> list[str]:
    """Return the keys of resources that may run code in a job, or hold secrets of its user."""
    extra = values.get("extra")
    options = extra if isinstance(extra, dict) else {}
    keys = [key for key in _CODE if values.get(key)]
    return keys + [f"extra={{{key}: ...}}" for key in options if key not in _RETRY_EXTRA]


_CODE = ("setup", "srun", "python")
# Options of sbatch that only ask for resources or say when a job runs and whom it tells. The others
# are not taken from a folder of runs: export: LD_PRELOAD=..., container: and plugins' run code.
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
OPTIONS = ("partition", "account", "qos", "constraint", "exclude")  # sbatch's own
# Options of sbatch that the sweep itself sets, or that have a key which its other parts read too.
_OURS = "array|chdir|error|job-name|open-mode|output|requeue|signal|wrap"
_KEYS = "nodes|ntasks|ntasks-per-node|time"
_SAFE = r"[\w.,:&|*@\-\[\]()/ +=%!?~]+"
_LINE = r"[^\x00-\x1f\x7f]+"
_OPTIONS = "sbatch options that the sweep does not set, as {mail-type: END}"
_GPUS = "a whole number or TYPE:NUMBER, such as a100:2"
_WHOLE = ("nodes", "tasks", "cpus", "throttle", "workers", "signal_s", "gpus")
_REAL = ("memory_gb", "tflops")
# What the values of keys are: a pattern for each item, and what was expected in words.
_VALUES = (
    ("kind", "slurm|local|debug", "slurm, local or debug"),
    (
        "partition account qos constraint exclude time",
        _SAFE,
        "no characters but those of sbatch options",
    ),
    ("nodes tasks cpus throttle workers", r"[1-9]\d{0,4}", "a whole number from 1 to 99999"),
    ("signal_s", r"[5-9]|[1-9]\d{1,4}", "a whole number from 5 to 99999"),
    ("memory_gb tflops", r"(?=[\d.]*[1-9])\d*\.?\d*(e[+-]?\d{1,2})?", "a number above 0"),
    ("gpus", r"([A-Za-z][\w.-]*:)?(0|[1-9]\d{0,3})", _GPUS),
    ("setup", _LINE, "a list of lines such as [module load cuda/12.4]; quote one with ': ' in it"),
    ("srun", "-" + _LINE, "a list of options, --NAME=VALUE in one"),
    ("python", _LINE, "the command that starts Python, such as apptainer exec IMAGE.sif python"),
    ("extra", rf"(?!({_OURS}|{_KEYS})=)[a-z][a-z0-9-]*={_SAFE}", _OPTIONS),
    ("scales", ".*", "a mapping of tiny, small, paper"),
)


def _checked(name: str, values: Mapping[str, Any], typed: Mapping[str, str]) -> Resources:
    """Return resources, or refuse what is wrong; a typed throttle bounds a pool's workers too."""
    where, shapes = f"resources {name}", get_type_hints(Resources)
    if "scales" in typed:
        raise SweepError("cluster.scales is the file's; type cluster.KEY=VALUE for one launch")
    texts = (*OPTIONS, "time", "python")
    read = {
        key: text if key in texts else yaml_of(text, f"cluster.{key}={text}", numbers_as_text=True)
        for key, text in typed.items()
    }
    given = {key: value for key, value in {**values, **read}.items() if value is not None}
    # As in `account: 12345`.
    given |= {key: str(given[key]) for key in OPTIONS if type(given.get(key)) is int}
    for key in given:
        one_of(f"{where}: unknown key", str(key), [*shapes][1:], SweepError)
    for keys, pattern, expected in _VALUES:
        for key in given.keys() & {*keys.split()}:
            value = given[key]
            items = value if isinstance(value, list) else [value]
            if isinstance(value, dict):
                items = [f"{option}={item}" for option, item in value.items()]
            good = all(re.fullmatch(pattern, str(item), re.ASCII) for item in items)
            if good and isinstance(value, str) and key in _WHOLE and value.isdecimal():
                given[key] = int(value)
            if good and isinstance(value, str) and key in _REAL:
                given[key] = float(value)
            if not (good and fits(given[key], shapes[key])):
                raise SweepError(f"{where}: {key}={_brief(value)}; expected {expected}")
    _check_extra(where, given.get("extra", {}))
    if "kind" not in given:
        raise SweepError(f"{where}: kind is missing; expected slurm, local or debug")
    found = _with_environment_cluster(Resources(**{**given, "name": name}))
    if found.kind != "slurm" and (code := [key for key in _CODE if getattr(found, key)]):
        raise SweepError(f"{where}: {code[0]} is for kind: slurm; here the shell's own counts")
    if found.kind != "slurm" and found.nodes * found.tasks > 1:
        raise SweepError(
            f"{where}: kind: {found.kind} gives a run one process; for several on this machine use "
            "torchrun experiments/run.py, for several nodes cluster=slurm"
        )
    if minutes(found.time) * 60 <= found.signal_s:
        raise SweepError(
            f"{where}: signal_s={found.signal_s} is not shorter than time={found.time}; a run "
            "would be told to stop as it starts"
        )
    if found.kind == "local" and "throttle" in typed:
        return replace(found, workers=min(found.workers, found.throttle))
    return found


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:80]}... ({len(text)} characters)"


def _check_extra(where: str, extra: Mapping[str, Any]) -> None:
    """Refuse abbreviations, which sbatch takes for options that are set already, and clusters."""
    for option in extra:
        for full in (*f"{_OURS}|{_KEYS}".split("|"), "clusters"):
            if full.startswith(option) and option != full:
                raise SweepError(
                    f"{where}: extra={{{option}: ...}} is short for {full}; expected {_OPTIONS}, "
                    "by their full names"
                )
    name = extra.get("clusters")
    if name is not None and not (isinstance(name, str) and is_slurm_cluster(name)):
        raise SweepError(
            f"{where}: extra={{clusters: {name}}}; expected the name of one cluster, since job ids "
            "are unique within a cluster only"
        )


def _with_environment_cluster(resources: Resources) -> Resources:
    """Name the cluster that sbatch would take from the environment, so that it is asked later."""
    if resources.kind != "slurm" or resources.slurm_cluster:
        return resources
    for variable in ("SBATCH_CLUSTERS", "SLURM_CLUSTERS"):
        name = os.environ.get(variable)
        if not name:
            continue
        if not is_slurm_cluster(name):
            raise SweepError(
                f"{variable}={name}; expected the name of one cluster: unset it, or choose one "
                "with cluster.extra={clusters: NAME}"
            )
        return replace(resources, extra={**resources.extra, "clusters": name})
    return resources


def minutes(time: str | int) -> int:
    """Return minutes of Slurm's times: `90`, `4:00:00`, `2-00:00:00`, `1-12`, or `SweepError`."""
    form = re.compile(r"(?:(\d{1,6})-)?(\d{1,6})(?::(\d{1,6}))?(?::(\d{1,6}))?", re.ASCII)
    match = form.fullmatch(str(time).strip())
    if match is None:
        raise SweepError(
            f"time={time!r}; expected minutes, hours:minutes:seconds or days-hours:minutes:seconds"
        )
    days, *parts = match.groups()
    a, b, c = (int(part or 0) for part in parts)
    if days is None and parts[2] is None:
        a, b, c = 0, a, b  # minutes, or minutes:seconds
    return max(1, math.ceil(((int(days or 0) * 24 + a) * 3600 + b * 60 + c) / 60))
