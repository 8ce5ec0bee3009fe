"""Where a sweep runs: one YAML file per cluster (by name or path), `cluster.KEY=...`.

`kind` is slurm, local or debug. Everything a Slurm site needs (partition, account, time, GPUs,
constraint) stands in that one file; `extra` passes any other sbatch option through, `setup`, `srun`
and `python` say what comes before and around a run. docs/cluster.md lists the keys.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from routing.errors import one_of
from routing.parsing import yaml_of
from sweeps import SweepError
from sweeps.planning.grid import named_yaml

FOLDER = Path(__file__).parents[1] / "resources"
KINDS = ("slurm", "local", "debug")


@dataclass(frozen=True)
class Resources:
    """What one run gets. `gpus` and `tasks` are per node; a task is one process of the run.

    `setup` are lines of the job's script before the run, `srun` further options of srun, `python`
    the command that starts Python in the job.
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
    """Read resources by name or path, with a scale's section and `cluster.KEY=VALUE`.

    Raises:
        SweepError: No such file, an unknown key, or a value of the wrong type or range.
    """
    path, raw = named_yaml("cluster", name, FOLDER, "kind, partition, time")
    where, scales = f"resources {path.stem}", raw.get("scales") or {}
    section = (scales.get(scale) or {}) if isinstance(scales, dict) else None
    if not isinstance(section, dict):
        raise SweepError(f"{where}: scales must map tiny, small, paper to mappings")
    values = {**raw, **section, **_typed(overrides or {})}
    known = [f.name for f in dataclasses.fields(Resources) if f.name != "name"]
    for key in values:
        one_of(f"{where}: unknown key", key, known, SweepError)
    if values.get("kind") is None:
        raise SweepError(f"{where}: kind is missing; expected slurm, local or debug")
    # A file of the user's is remembered by its place, for a retry from another folder.
    name = str(path.resolve()) if path.parent != FOLDER else path.stem
    return _checked(Resources(name=name, **{k: v for k, v in values.items() if v is not None}))


def again(values: Mapping[str, Any], overrides: Mapping[str, str]) -> Resources:
    """Return the resources of an earlier submission, with `cluster.KEY=VALUE` overrides.

    Raises:
        SweepError: It had lines of a shell: a folder of runs, which may come from anywhere, names
            no code.
    """
    known = {f.name for f in dataclasses.fields(Resources)}
    for key in overrides:
        one_of("unknown key of cluster:", key, sorted(known), SweepError)
    if code := [key for key in _CODE if values.get(key)]:
        raise SweepError(
            f"the last launch had cluster.{code[0]}, and what runs code is not taken from a folder "
            f"of runs: type cluster= again (it was cluster={values.get('name')})"
        )
    kept = {k: v for k, v in values.items() if k in known}
    return _checked(Resources(**kept | _typed(overrides)))


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


def _checked(found: Resources) -> Resources:
    where = f"resources {found.name}"
    one_of(f"{where}: kind", found.kind, KINDS, SweepError)
    for key, least in _WHOLE.items():
        value = getattr(found, key)
        if type(value) is not int or not least <= value <= _MOST:
            raise SweepError(
                f"{where}: {key}={value!r}; expected a whole number from {least} to {_MOST}"
            )
    if not re.fullmatch(r"([A-Za-z][\w.-]*:)?\d{1,4}", str(found.gpus), re.ASCII):
        raise SweepError(
            f"{where}: gpus={found.gpus!r}; expected a whole number or TYPE:NUMBER, such as a100:2"
        )
    for key in ("setup", "srun"):
        lines = getattr(found, key)
        if not isinstance(lines, list) or not all(
            isinstance(line, str) and line.strip() and line.isprintable() for line in lines
        ):
            raise SweepError(
                f"{where}: {key} must be a list of texts of one line each, such as "
                f"{_EXAMPLES[key]}, got {lines!r} (a text with ': ' in it needs quotes)"
            )
    python = found.python
    if python is not None and not (isinstance(python, str) and python.isprintable() and python):
        raise SweepError(
            f"{where}: python={python!r}; expected the command that starts Python in a job, "
            "such as 'apptainer exec --nv /images/torch.sif python'"
        )
    if odd := [word for word in found.srun if not word.startswith("-")]:
        raise SweepError(f"{where}: srun has {odd[0]!r}; expected options, --NAME=VALUE in one")
    if found.kind != "slurm" and (given := [key for key in _CODE if getattr(found, key)]):
        raise SweepError(f"{where}: {given[0]} is for kind: slurm; here the shell's own counts")
    for key in ("memory_gb", "tflops"):
        value = getattr(found, key)
        if value is not None and (not isinstance(value, int | float) or not 0 < value < math.inf):
            raise SweepError(f"{where}: {key}={value!r}; expected a number above 0")
    for key in _TEXT:
        value = getattr(found, key)
        if value is not None and not _SAFE.match(str(value)):
            raise SweepError(f"{where}: {key}={value!r} has characters that no sbatch option has")
    if not isinstance(found.extra, Mapping) or not all(
        re.match(r"[a-z][a-z0-9-]*\Z", str(k)) and _SAFE.match(str(v))
        for k, v in found.extra.items()
    ):
        raise SweepError(
            f"{where}: extra must map sbatch's long options to plain values, "
            "such as {mail-type: END}"
        )
    if taken := sorted(_OURS & set(found.extra)):
        raise SweepError(f"{where}: extra sets {', '.join(taken)}, which the sweep itself sets")
    if taken := sorted(_KEYS.keys() & set(found.extra)):
        raise SweepError(f"{where}: extra sets {taken[0]}; expected the key {_KEYS[taken[0]]}")
    if found.minutes * 60 <= found.signal_s:
        raise SweepError(
            f"{where}: signal_s={found.signal_s} is not shorter than time={found.time}; "
            "a run would be told to stop as it starts"
        )
    return found


def minutes(time: str) -> int:
    """Return minutes of Slurm's time formats: `90` (minutes), `4:00:00`, `2-00:00:00`, `1-12`.

    Raises:
        SweepError: It is none of them.
    """
    number = r"(\d{1,6})"
    match = re.fullmatch(
        rf"(?:{number}-)?{number}(?::{number})?(?::{number})?", str(time).strip(), re.ASCII
    )
    if match is None:
        raise SweepError(
            f"time={time!r}; expected minutes, hours:minutes:seconds or days-hours:minutes:seconds"
        )
    days, a, b, c = match.groups()
    if days is not None:
        seconds = int(days) * 86400 + int(a) * 3600 + int(b or 0) * 60 + int(c or 0)
    elif c is not None:
        seconds = int(a) * 3600 + int(b) * 60 + int(c)
    else:
        seconds = int(a) * 60 + int(b or 0)
    return max(1, math.ceil(seconds / 60))
