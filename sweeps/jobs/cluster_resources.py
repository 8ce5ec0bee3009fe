"""Where a sweep runs: one YAML file per cluster (by name or path), `cluster.KEY=...`.

Everything a Slurm site needs (partition, account, time, GPUs, constraint) stands in that one file;
`extra` passes any other sbatch option through. docs/cluster.md lists the keys.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from routing.errors import one_of
from routing.parsing import is_number, yaml_of
from sweeps import SweepError
from sweeps.planning.grid import named_yaml

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
    time: str = "4:00:00"
    signal_s: int = 180
    throttle: int = 16
    workers: int = 1
    tflops: float | None = None
    setup: list[str] = field(default_factory=list)
    srun: list[str] = field(default_factory=list)
    python: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    scales: Mapping[str, Any] = field(default_factory=dict)

    @property
    def minutes(self) -> int:
        """The time limit in whole minutes."""
        return minutes(self.time)

    @property
    def gpu_count(self) -> int:
        """GPUs per node, of whatever type."""
        return int(str(self.gpus).rpartition(":")[2])


def load(name: str, scale: str = "tiny", overrides: Mapping[str, str] | None = None) -> Resources:
    """Read resources (name or path), a scale's section, `cluster.KEY=VALUE`; or `SweepError`."""
    path, raw = named_yaml("cluster", name, FOLDER, "kind, partition, time")
    where, scales = f"resources {path.stem}", raw.get("scales") or {}
    section = (scales.get(scale) or {}) if isinstance(scales, dict) else None
    if not isinstance(section, dict):
        raise SweepError(f"{where}: scales must map tiny, small, paper to mappings")
    values = {**raw, **section, **_typed(overrides or {})}
    known = [f.name for f in fields(Resources) if f.name != "name"]
    for key in values:
        one_of(f"{where}: unknown key", key, known, SweepError)
    if values.get("kind") is None:
        raise SweepError(f"{where}: kind is missing; expected slurm, local or debug")
    # A file of the user's is remembered by its place, for a retry from another folder.
    name = str(path.resolve()) if path.parent != FOLDER else path.stem
    given = {k: v for k, v in values.items() if v is not None}
    return _checked(Resources(name=name, **given), overrides or {})


def again(values: Mapping[str, Any], overrides: Mapping[str, str]) -> Resources:
    """Return the resources of an earlier submission, with `cluster.KEY=VALUE` overrides.

    `SweepError` if it had lines of a shell: a folder of runs, which may come from anywhere, names
    no code.
    """
    known = {f.name for f in fields(Resources)}
    for key in overrides:
        one_of("unknown key of cluster:", key, sorted(known), SweepError)
    if code := [key for key in _CODE if values.get(key)]:
        raise SweepError(
            f"the last launch had cluster.{code[0]}, and what runs code is not taken from a folder "
            f"of runs: type cluster= again (it was cluster={values.get('name')})"
        )
    kept = {"name": "", "kind": ""} | {k: v for k, v in values.items() if k in known}
    return _checked(Resources(**kept | _typed(overrides)), overrides)


def _typed(words: Mapping[str, str]) -> dict[str, Any]:
    if "scales" in words:
        raise SweepError("cluster.scales is the file's; type cluster.KEY=VALUE for one launch")
    texts = (*_TEXT, "python")
    return {k: v if k in texts else yaml_of(v, f"cluster.{k}={v}") for k, v in words.items()}


_TEXT = ("partition", "account", "qos", "constraint", "exclude", "time")
_CODE = ("setup", "srun", "python")
_WHOLE = {"nodes": 1, "tasks": 1, "cpus": 1, "signal_s": 5, "throttle": 1, "workers": 1}
_MOST = 100_000
_OURS = {"array", "chdir", "error", "job-name", "open-mode", "output", "requeue", "signal", "wrap"}
# Options with a key of their own, which other parts of a sweep read too.
_KEYS = {"nodes": "nodes", "ntasks": "tasks", "ntasks-per-node": "tasks", "time": "time"}
_SAFE = re.compile(r"[\w.,:&|*@\-\[\]()/ +=%!?~]+\Z")
_EXAMPLES = {
    "setup": "[module load cuda/12.4, export NCCL_DEBUG=WARN]",
    "srun": "[--container-image=/images/torch.sqsh]",
}


def _checked(found: Resources, typed: Collection[str]) -> Resources:
    """Refuse what is wrong; a throttle that was typed bounds a pool's workers too."""
    one_of(f"resources {found.name}: kind", found.kind, ("slurm", "local", "debug"), SweepError)
    for fault in _faults(found):
        raise SweepError(f"resources {found.name}: {fault}")
    if found.kind == "local" and "throttle" in typed:
        return replace(found, workers=min(found.workers, found.throttle))
    return found


def _faults(found: Resources) -> Iterator[str]:
    """Yield what is wrong with a value and what was expected; later checks rely on earlier ones."""
    for key, least in _WHOLE.items():
        value = getattr(found, key)
        if type(value) is not int or not least <= value <= _MOST:
            yield f"{key}={value!r}; expected a whole number from {least} to {_MOST}"
    if not re.fullmatch(r"([A-Za-z][\w.-]*:)?\d{1,4}", str(found.gpus), re.ASCII):
        yield f"gpus={found.gpus!r}; expected a whole number or TYPE:NUMBER, such as a100:2"
    for key, example in _EXAMPLES.items():
        lines = getattr(found, key)
        texts = isinstance(lines, list) and all(isinstance(line, str) for line in lines)
        if not texts or not all(line.strip() and line.isprintable() for line in lines):
            what = f"must be a list of texts of one line each, such as {example}"
            yield f"{key} {what}, got {lines!r} (a text with ': ' in it needs quotes)"
    python = found.python
    if python is not None and not (isinstance(python, str) and python.isprintable() and python):
        example = "'apptainer exec --nv /images/torch.sif python'"
        what = f"the command that starts Python in a job, such as {example}"
        yield f"python={python!r}; expected {what}"
    if odd := [word for word in found.srun if not word.startswith("-")]:
        yield f"srun has {odd[0]!r}; expected options, --NAME=VALUE in one"
    if found.kind != "slurm" and (given := [key for key in _CODE if getattr(found, key)]):
        yield f"{given[0]} is for kind: slurm; here the shell's own counts"
    if found.kind != "slurm" and found.nodes * found.tasks > 1:
        what = f"kind: {found.kind} gives a run one process; for several on this machine use"
        yield f"{what} torchrun experiments/run.py, for several nodes cluster=slurm"
    for key in ("memory_gb", "tflops"):
        value = getattr(found, key)
        if value is not None and not (is_number(value) and value > 0):
            yield f"{key}={value!r}; expected a number above 0"
    for key in _TEXT:
        value = getattr(found, key)
        if value is not None and not _SAFE.match(str(value)):
            yield f"{key}={value!r} has characters that no sbatch option has"
    if not isinstance(found.extra, Mapping) or not all(
        re.match(r"[a-z][a-z0-9-]*\Z", str(k))
        and _SAFE.match(str(v))
        # YAML makes a date of a day, which neither sbatch nor a file of ours reads as it was typed.
        and isinstance(v, str | int | float | None)
        for k, v in found.extra.items()
    ):
        what = "{mail-type: END}; a date needs quotes"
        yield f"extra must map sbatch's long options to plain values, such as {what}"
    if taken := sorted(_OURS & set(found.extra)):
        yield f"extra sets {', '.join(taken)}, which the sweep itself sets"
    if taken := sorted(_KEYS.keys() & set(found.extra)):
        yield f"extra sets {taken[0]}; expected the key {_KEYS[taken[0]]}"
    if found.minutes * 60 <= found.signal_s:
        late = f"signal_s={found.signal_s} is not shorter than time={found.time}"
        yield f"{late}; a run would be told to stop as it starts"


def minutes(time: str) -> int:
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
