"""A sweep on disk: `<runs>/.sweeps/<grid>/`, readable from any shell, later, without a database.

sweep.json        the runs: name, overrides, folder, steps            (rewritten whole)
batches.jsonl     what was submitted: intent, then ids, times, code   (appended)
attempts/*.jsonl  per run: every start and end, by the jobs           (appended)
logs/             what the jobs printed
outputs/          of commands that are no training run
../code/<hash>/   a copy of the code, so that a requeued job runs what was submitted
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from experiments.runtime import run_folder
from experiments.runtime.command import PACKAGES, ROOT
from experiments.runtime.console import append_jsonl, read_jsonl
from experiments.runtime.files import atomic_write, code_commit
from sweeps import SweepError
from sweeps.jobs.cluster_resources import is_slurm_cluster, untrusted_keys
from sweeps.planning.grid import is_file_name
from sweeps.planning.overrides import fits, record
from sweeps.planning.planned_runs import PlannedRun

# No part of a snapshot of the code; hidden files are an editor's.
_IGNORED = shutil.ignore_patterns(".*", "__pycache__", "notebooks", "*.pyc", "*.so.tmp", "*~")


@dataclass
class JobBatch:
    """One submission: which runs, where, and the ids they got (none if it was cut off)."""

    name: str
    cluster: str
    kind: str
    runs: list[str]
    time: float
    code: str
    resources: dict[str, Any] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)
    slurm_cluster: str = ""  # of a multi-cluster Slurm, where the ids belong; "" for the default


class Sweep:
    """The folder of one grid below one folder of runs."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name = root, name
        # A launch locks all sweeps of one folder of runs, for two grids may share a run.
        self.locked_folder = root / ".sweeps"
        self.snapshots = self.locked_folder / "code"  # of the code, shared by these sweeps
        self.path = self.locked_folder / name
        self.logs = self.path / "logs"  # the jobs' output
        self.pools = self.path / "pools"  # of workers on this machine, by batch

    def log(self, batch: JobBatch, run: str, kind: str) -> Path | None:
        """Return the path of a run's log in a batch (`kind` is out or err), None without a job."""
        if batch.kind == "slurm":
            return self.logs / f"{batch.ids[run]}_0_log.{kind}" if run in batch.ids else None
        return self.logs / f"{batch.name}_{run}.{kind}"

    def runs(self) -> dict[str, PlannedRun]:
        """Return the runs of every launch so far, by name."""
        path = self.path / "sweep.json"
        values: Any = run_folder.read(path).get("runs") if path.is_file() else {}
        with contextlib.suppress(AttributeError, SweepError):
            known = {name: record(PlannedRun, run) for name, run in values.items()}
            if all(is_file_name(run.name) for run in known.values()):
                return known
        raise SweepError(  # launching would read it, too
            f"{path} cannot be read; if it is damaged, remove it, then launch the grid again"
        )

    def add(self, title: str, runs: Iterable[PlannedRun]) -> None:
        """Write runs into the sweep's file; a name that is there gets the new one's steps."""
        known = self.runs() | {run.name: run for run in runs}
        values = {"format": 1, "title": title, "runs": {n: r.__dict__ for n, r in known.items()}}
        atomic_write(self.path / "sweep.json", json.dumps(values, indent=1))

    def batches(self) -> list[JobBatch]:
        """Return the submissions in order, each with its ids if they were written."""
        found: dict[str, JobBatch] = {}
        for line in read_jsonl(self.path / "batches.jsonl"):
            name = str(line.get("batch"))
            ids: Any = line.get("ids")
            if "runs" not in line:
                if name in found and fits(ids, dict[str, str]):
                    found[name].ids.update(ids)
                    cluster = line.get("slurm_cluster")
                    if isinstance(cluster, str) and is_slurm_cluster(cluster):
                        found[name].slurm_cluster = cluster
            elif is_file_name(name) and _is_time(line.get("time")):  # a pool's folder is called so
                with contextlib.suppress(SweepError):
                    batch = record(JobBatch, {**line, "name": name})
                    if is_slurm_cluster(batch.slurm_cluster or "default"):
                        found[name] = batch
        return list(found.values())

    def latest_batches(self) -> dict[str, JobBatch]:
        """Return the last submission of each run, by the run's name."""
        return {run: batch for batch in self.batches() for run in batch.runs}

    def intend(self, batch: JobBatch) -> None:
        """Note a submission before it is made, so that the queue tells of one that is cut off.

        Lines of `setup` may hold secrets: with them the file is readable by its owner alone.
        """
        if untrusted_keys(batch.resources):
            path = self.path / "batches.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            path.chmod(0o600)
        values = {k: v for k, v in batch.__dict__.items() if k not in ("name", "ids")}
        append_jsonl(self.path / "batches.jsonl", [{"batch": batch.name, **values}])

    def submitted(
        self, batch: str, ids: Mapping[str, str], note: str = "", slurm_cluster: str = ""
    ) -> None:
        """Note the ids that runs of a submission got, and on which cluster if sbatch said it."""
        line = {"batch": batch, "ids": dict(ids), "note": note}
        line |= {"slurm_cluster": slurm_cluster} if slurm_cluster else {}
        append_jsonl(self.path / "batches.jsonl", [line])

    def is_done(self, run: PlannedRun) -> bool:
        """Whether nothing is left to do for a run; its command sees a parent that went on again."""
        if run.trains:
            return run.finished
        mark, now = run_folder.read(self.path / "done" / f"{run.name}.json"), run.parent_step
        return bool(mark) and (now is None or mark.get("step", now) == now)

    def mark_done(self, run: str, step: int | None) -> None:
        """Note that a command which is no training run has ended well, at a step of its parent."""
        mark = self.path / "done" / f"{run}.json"
        atomic_write(mark, json.dumps({"run": run, "time": time.time(), "step": step}))

    def events(self, run: str) -> list[dict[str, Any]]:
        """Return the starts and ends of a run, and what was asked of it, oldest first."""
        lines = read_jsonl(self.attempts(run))
        return [x for x in lines if isinstance(x.get("event"), str) and _is_time(x.get("time"))]

    def attempts(self, run: str) -> Path:
        """Return the file of a run's events, appended by its jobs."""
        return self.path / "attempts" / f"{run}.jsonl"

    def note(self, run: str, event: str, **values: Any) -> None:
        """Append an event of a run with the time."""
        append_jsonl(self.attempts(run), [{"event": event, "time": time.time(), **values}])


def all_sweeps(root: Path) -> list[Sweep]:
    """Return the sweeps below a folder of runs."""
    return [Sweep(root, p.parent.name) for p in sorted((root / ".sweeps").glob("*/sweep.json"))]


def _is_time(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and abs(value) < 1e11  # the calendar of C ends there


def snapshot(where: Path, root: Path = ROOT, own: Path | None = None) -> Path:
    """Copy the packages in `root` to `where/<hash>` unless they are there; return that folder.

    A copy that is there is trusted for its content alone: the folder may come from anywhere, and
    jobs import from it. One that differs is replaced, with a warning. A grid in Python, `own`, is
    kept beside the packages. The caller holds the lock of all sweeps.

    Raises:
        SweepError: A copy that differs cannot be replaced.
    """
    building = where / ".building"
    _remove(building)  # of a copy that was cut off
    building.mkdir(parents=True)
    for package in PACKAGES:
        shutil.copytree(root / package, building / package, ignore=_IGNORED)
    if own is not None:
        shutil.copy(own, building)
    _make_writable(building)
    digest = _content_hash(building)
    if digest is None:  # `copytree` copies what links lead to
        raise SweepError(f"{root} has a file that cannot be copied, such as a pipe; remove it")
    target = where / digest[:12]
    # A link leads to files that are not ours to look through, let alone to remove.
    if target.is_dir() and not target.is_symlink():
        # Compiled by a job, or planted: Python prefers it to the source that is hashed.
        for cache in [*target.rglob("__pycache__")]:
            _remove(cache)
        if (target / "snapshot.json").is_file() and _content_hash(target) == digest:
            _remove(building)
            return target
    if target.is_symlink() or (target / "snapshot.json").is_file():
        text = f"{target} was changed after it was copied; it is copied again"
        warnings.warn(text, SnapshotWarning, stacklevel=2)
    _remove(target)  # or a part of one
    facts = {"commit": code_commit(root), "hash": target.name, "time": time.time()}
    atomic_write(building / "snapshot.json", json.dumps(facts, indent=1))
    building.rename(target)
    return target


class SnapshotWarning(UserWarning):
    """A copy of the code that somebody changed."""


def _content_hash(folder: Path) -> str | None:
    """Return the hash of a copy's files without `snapshot.json`; None if it has links or devices.

    Jobs that run now write `__pycache__` again after its removal: it does not count.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if "__pycache__" in path.relative_to(folder).parts:
            continue
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            return None
        if path.is_file() and path != folder / "snapshot.json":
            content = path.read_bytes()
            digest.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _remove(path: Path) -> None:
    """Remove a folder with its content, a file, or a link alone; `SweepError` if it stays."""
    try:
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.exists():
            _make_writable(path)
            shutil.rmtree(path)
    except OSError as error:
        raise SweepError(
            f"{path} is no copy of this code and cannot be removed ({error.strerror}); remove it, "
            "or type another paths.runs=FOLDER"
        ) from None


def _make_writable(folder: Path) -> None:
    """Let folders be removed which have the modes of a read-only installation."""
    for path in [path for path in (folder, *folder.rglob("*")) if path.is_dir()]:
        path.chmod(path.stat().st_mode | 0o700)


def python_path(code: Path) -> str:
    """Return PYTHONPATH with the snapshot as the first place that Python looks in."""
    rest = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != str(code)]
    return os.pathsep.join([str(code), *rest])
