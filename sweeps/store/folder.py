"""A sweep on disk: `<runs>/.sweeps/<grid>/`, readable from any shell, later, without a database.

sweep.json        the last launch as typed; the runs: name, steps     (rewritten as a whole)
batches.jsonl     submissions: intent, then ids, times, code          (appended)
attempts/*.jsonl  per run: every start and end, by the jobs           (appended)
logs/             output of the jobs
outputs/          of commands other than training
resolved/         run folders that became known when a parent had finished
pools/            states of the pools on this machine, and who is to leave them
launches/<id>/    for its owner alone: a copy of the code, and what the jobs of a launch read

The files may be damaged, or written by somebody else: they are shown and compared, and nothing in
them is executed. A retry plans the grid again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shlex
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from backbones.parsing import is_number
from backbones.validation import fields_of, validate, validate_value
from experiments.runtime import run_folder
from experiments.runtime.files import atomic_write, refuse_links
from experiments.runtime.records import append_jsonl, read_jsonl
from routing.errors import UserError, require
from sweeps import NothingSubmitted, SweepError
from sweeps.store.overrides import format_value, parse, runs_root
from sweeps.store.planned_run import RunRecord, values_of
from sweeps.store.resource_options import Resources, RunResources, is_slurm_cluster

Record = TypeVar("Record")
_JOB_ID = re.compile(r"\d+(_\d+)?", re.ASCII)
Run = TypeVar("Run", bound=RunRecord)
# Of the resources of a submission, what is shown; `setup` and the like may hold secrets.
_SHOWN_RESOURCES = (*fields_of(RunResources), "throttle", "workers")
# Keys that a retry has to be typed with by the user, whatever is stored.
_NEVER_STORED = ("cluster", "dry", "paths.runs")


@dataclass(frozen=True)
class Launch:
    """A launch as typed: shown and compared, never executed.

    Attributes:
        grid: Its name or path.
        overrides: `key=value`, with `scale=`; without `cluster=`.
        runs: Names of its runs.
        compare_at: `--compare-at`.
    """

    grid: str
    overrides: list[str]
    runs: list[str]
    compare_at: Literal["steps", "flops"] = "steps"

    def check_consistency(self) -> None:
        """Refuse what no launch stores: such a file is somebody else's."""
        keys = [text.partition("=")[0].rpartition(":")[2] for text in self.overrides]
        foreign = any(key in _NEVER_STORED or key.startswith("cluster.") for key in keys)
        options = [text for text in (self.grid, *self.overrides) if text.startswith("-")]
        require(not foreign and not options, "not a launch", SweepError)

    def retry_line(self, root: Path) -> str:
        """Return the command that submits its failed and missing runs again."""
        words = ["python", "-m", "sweeps", "launch", self.grid, *self.overrides]
        if root != runs_root({}):
            words.append(f"paths.runs={format_value(str(root))}")
        if self.compare_at != "steps":
            words += ["--compare-at", self.compare_at]
        return shlex.join([*words, "--retry"])


@dataclass
class JobBatch:
    """One submission.

    Attributes:
        name: Name of its jobs, and of a pool's folder.
        cluster: Name or path of its cluster file.
        kind: slurm, local or debug.
        runs: Names of its runs; an array has a task for each, in this order.
        time: When it was submitted, in seconds since the epoch.
        code: Hash of its copy of the code; "" for `debug`.
        launch: Name of the folder of its launch, which has that copy; "" for `debug`.
        resources: What each run asked for, and how many run at once.
        ids: Job ids by run; none if the submission was cut off.
        slurm_cluster: Cluster of a multi-cluster Slurm that the ids belong to; "" for the default.
    """

    name: str
    cluster: str
    kind: str
    runs: list[str]
    time: float
    code: str
    resources: dict[str, Any] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)
    slurm_cluster: str = ""
    launch: str = ""

    @classmethod
    def create(
        cls, sweep: str, runs: Sequence[RunRecord], resources: Resources, code: str = "",
        launch: str = "",
    ) -> JobBatch:  # fmt: skip
        """Return a submission of a sweep's runs, with a new name."""
        return cls(
            name=f"{sweep}.{uuid.uuid4().hex[:8]}",
            cluster=resources.name,
            kind=resources.kind,
            runs=[run.name for run in runs],
            time=time.time(),
            code=code,
            resources={key: getattr(resources, key) for key in _SHOWN_RESOURCES},
            slurm_cluster=resources.slurm_cluster,
            launch=launch,
        )

    @property
    def runs_per_task(self) -> int:
        """How many of its runs share a task of its array; 1 outside Slurm."""
        value = self.resources.get("runs_per_gpu")
        return value if self.kind == "slurm" and type(value) is int and value > 0 else 1

    def tasks(self) -> list[list[str]]:
        """Return the names of the runs of each task."""
        size = self.runs_per_task
        return [self.runs[start : start + size] for start in range(0, len(self.runs), size)]

    def task_name(self, run: str) -> str:
        """Return the name of the folder of the task that has a run."""
        return f"{self.name}.{self.runs.index(run) // self.runs_per_task}"


class Sweep:
    """The folder of one grid in a folder of runs.

    Attributes:
        locked_folder: Locked by a launch, since two grids may share a run.
        launches: Folders of the launches with jobs.
        logs: Output of the jobs.
        pools: States of the pools on this machine, by batch.
    """

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name = root, name
        self.locked_folder = root / ".sweeps"
        self.path = self.locked_folder / name
        self.launches = self.path / "launches"
        self.logs = self.path / "logs"
        self.pools = self.path / "pools"

    def open(self) -> Sweep:
        """Return this folder, which may be somebody else's, or refuse a link in it.

        Raises:
            UserError: The message names the link.
        """
        trees = ("attempts", "logs", "outputs", "resolved", "done", "pools")
        refuse_links(self.root, [".sweeps", ".sweeps/lock", f".sweeps/{self.name}"])
        # In a folder of launches and in that of a search there are links of submitit and optuna.
        files = ("sweep.json", "batches.jsonl", "launches", "search", "search/journal.log")
        refuse_links(self.path, files, trees)
        return self

    def command(self, name: str) -> str:
        """Return a command on this sweep as typed in the folder that it was launched from."""
        words = ["python", "-m", "sweeps", name, self.name]
        if self.root != runs_root({}):
            words.append(shlex.quote(f"paths.runs={format_value(str(self.root))}"))
        return " ".join(words)

    def log(self, batch: JobBatch, run: str, kind: str) -> Path | None:
        """Return the path of a run's log in a batch (`kind` is out or err), None without a job."""
        own_log = self.logs / f"{batch.name}_{run}.{kind}"
        if batch.kind != "slurm" or (batch.runs_per_task > 1 and own_log.exists()):
            return own_log
        return self.task_log(batch, run, kind)

    def task_log(self, batch: JobBatch, run: str, kind: str) -> Path | None:
        """Return the path of the log of a run's task on Slurm, None without a job."""
        return self.logs / f"{batch.ids[run]}_0_log.{kind}" if run in batch.ids else None

    def retry_lines(self, names: Collection[str]) -> list[str]:
        """Return the commands that submit these runs again, newest launch first, for the user.

        They lack `cluster=`, and a run that is in no stored launch has none.
        """
        lines, missing = [], set(names)
        for launch in reversed(self._launches()):
            if not missing.isdisjoint(launch.runs):
                missing.difference_update(launch.runs)
                lines.append(launch.retry_line(self.root))
        return lines

    def _launches(self) -> list[Launch]:
        """Return the stored launches, oldest first, without damaged ones."""
        stored, launches = run_folder.read(self.path / "sweep.json").get("launches"), []
        for values in stored if isinstance(stored, list) else ():
            with contextlib.suppress(UserError):
                launch = read_record(Launch, values)
                parse(launch.overrides)
                if launch.retry_line(self.root).isprintable():
                    launches.append(launch)
        return launches

    def runs(self) -> dict[str, RunRecord]:
        """Return the runs of every launch so far, by name.

        Raises:
            SweepError: The file is damaged; launching the grid again writes a new one.
        """
        return {name: self.resolved(run) for name, run in self._stored_runs().items()}

    def _stored_runs(self) -> dict[str, RunRecord]:
        path = self.path / "sweep.json"
        values: Any = run_folder.read(path).get("runs") if path.is_file() else {}
        with contextlib.suppress(AttributeError, UserError):
            runs = {name: self._record(run) for name, run in values.items()}
            if all(is_file_name(name) and run.name == name for name, run in runs.items()):
                return runs
        raise SweepError(
            f"{path} cannot be read; if it is damaged, remove it, then launch the grid again"
        )

    def _record(self, values: Any) -> RunRecord:
        """Return a stored run; its folder is one in this folder of runs, whatever is stored."""
        run = read_record(RunRecord, values)
        arguments = values.get("args")
        if "values" not in values and isinstance(arguments, list):  # of the first format
            run = replace(run, values=values_of(map(str, arguments)) | run.varies)
        return replace(run, folder=self._below_root(run.folder))

    def _below_root(self, folder: str) -> str:
        name = Path(folder).name
        return str(self.root / name) if is_file_name(name) else ""

    def add(self, title: str, runs: Iterable[RunRecord], launch: Launch | None = None) -> None:
        """Write runs to the sweep's file; one of the same name is replaced."""
        values = {name: run.facts() for name, run in self._stored_runs().items()}
        for run in runs:
            values[run.name] = run.facts()
        launches = self._launches()
        if launch is not None:
            new = set(launch.runs)
            launches = [old for old in launches if not new.issuperset(old.runs)]
            launches.append(launch)
        stored = [launch.__dict__ for launch in launches]
        content = {"format": 2, "title": title, "launches": stored, "runs": values}
        atomic_write(self.path / "sweep.json", json.dumps(content, indent=1))

    def batches(self) -> list[JobBatch]:
        """Return the submissions in order, each with its ids if they were written."""
        batches: dict[str, JobBatch] = {}
        for line in read_jsonl(self.path / "batches.jsonl"):
            name = str(line.get("batch"))
            if "runs" not in line:
                if name in batches:
                    _add_ids(batches[name], line)
            elif self._is_batch_name(name) and is_timestamp(line.get("time")):
                with contextlib.suppress(UserError):
                    batch = read_record(JobBatch, {**line, "name": name})
                    is_known = is_slurm_cluster(batch.slurm_cluster or "default")
                    if is_known and all(map(is_file_name, batch.runs)):
                        batches[name] = batch
        return list(batches.values())

    def _is_batch_name(self, name: str) -> bool:
        """Return whether `JobBatch.create` makes such names: others are not of our jobs."""
        return re.fullmatch(re.escape(self.name) + r"\.[0-9a-f]{8}", name) is not None

    def latest_batches(self) -> dict[str, JobBatch]:
        """Return the last submission of each run, by the run's name."""
        latest = {}
        for batch in self.batches():
            for run in batch.runs:
                latest[run] = batch
        return latest

    def intend(self, batch: JobBatch) -> None:
        """Note a submission before it is made: one that is cut off is found in the queue."""
        line = {"batch": batch.name, **batch.__dict__}
        del line["name"], line["ids"]
        append_jsonl(self.path / "batches.jsonl", [line])

    @contextlib.contextmanager
    def undo_if_refused(self) -> Iterator[None]:
        """Remove what was noted of a submission that is refused; the caller holds the lock.

        From `intend` on, the scheduler may have the jobs: only `NothingSubmitted` undoes it then.

        Enter it after looking at the queue, which may note ids of an earlier submission.
        """
        runs, batches = self.path / "sweep.json", self.path / "batches.jsonl"
        content = runs.read_bytes() if runs.is_file() else None
        size = batches.stat().st_size if batches.is_file() else None
        try:
            yield
        except SweepError as error:
            is_intended = batches.is_file() and batches.stat().st_size != (size or 0)
            if is_intended and not isinstance(error, NothingSubmitted):
                raise
            if content is None:
                runs.unlink(missing_ok=True)
            else:
                atomic_write(runs, content)
            if size is None:
                batches.unlink(missing_ok=True)
            elif batches.is_file():
                os.truncate(batches, size)  # only appended to
            raise

    def submitted(
        self, batch: str, ids: Mapping[str, str], note: str = "", slurm_cluster: str = ""
    ) -> None:
        """Note the ids that the runs of a submission got, and the cluster that sbatch named."""
        line: dict[str, Any] = {"batch": batch, "ids": dict(ids), "note": note}
        if slurm_cluster:
            line["slurm_cluster"] = slurm_cluster
        append_jsonl(self.path / "batches.jsonl", [line])

    def note_throttle(self, batch: JobBatch, throttle: int) -> None:
        """Note another limit of runs at once of a live array."""
        append_jsonl(self.path / "batches.jsonl", [{"batch": batch.name, "throttle": throttle}])

    def resolved(self, run: Run) -> Run:
        """Return a run with its folder, if that became known when its parent was done."""
        folder = self.resolution(run.name) if run.deferred else ""
        return replace(run, folder=folder or run.folder)

    def resolution(self, run: str) -> str:
        """Return the folder of a run that was submitted before its parent was done, "" before."""
        folder = run_folder.read(self._resolution(run)).get("folder")
        return self._below_root(folder) if isinstance(folder, str) else ""

    def resolve(self, run: str, folder: str) -> None:
        """Store the folder of a run, which is known once its parent is done."""
        atomic_write(self._resolution(run), json.dumps({"folder": Path(folder).name}))

    def forget_resolution(self, run: str) -> None:
        """Forget a run's folder, since its parent trains further and its weights will change."""
        self._resolution(run).unlink(missing_ok=True)

    def _resolution(self, run: str) -> Path:
        return self.path / "resolved" / f"{run}.json"

    def is_done(self, run: RunRecord) -> bool:
        """Return whether a run is finished; a command is not if its parent has trained on since."""
        if run.trains:
            return run.finished
        mark, parent_step = run_folder.read(self._mark(run.name)), run.parent_step
        return bool(mark) and parent_step in (None, mark.get("step", parent_step))

    def mark_done(self, run: str, step: int | None) -> None:
        """Note that a command other than training has ended well, at a step of its parent."""
        values = {"run": run, "time": time.time(), "step": step}
        atomic_write(self._mark(run), json.dumps(values))

    def _mark(self, run: str) -> Path:
        return self.path / "done" / f"{run}.json"

    def events(self, run: str) -> list[dict[str, Any]]:
        """Return the starts and ends of a run, and cancellations, oldest first."""
        events = []
        for line in read_jsonl(self.attempts(run)):
            if isinstance(line.get("event"), str) and is_timestamp(line.get("time")):
                events.append(line)
        return events

    def attempts(self, run: str) -> Path:
        """Return the file of a run's events, appended by its jobs."""
        return self.path / "attempts" / f"{run}.jsonl"

    def note(self, run: str, event: str, **values: Any) -> None:
        """Append an event of a run with the time."""
        append_jsonl(self.attempts(run), [{"event": event, "time": time.time(), **values}])


def _add_ids(batch: JobBatch, line: Mapping[str, Any]) -> None:
    """Add the ids or the throttle in a line of batches.jsonl to its batch, unless damaged."""
    if type(line.get("throttle")) is int:
        batch.resources["throttle"] = line["throttle"]
    with contextlib.suppress(UserError):
        cluster = line.get("slurm_cluster")
        ids = validate_value(dict[str, str], line.get("ids"), "ids")
        if batch.kind != "slurm" or all(_JOB_ID.fullmatch(job_id) for job_id in ids.values()):
            batch.ids.update(ids)
        if isinstance(cluster, str) and is_slurm_cluster(cluster):
            batch.slurm_cluster = cluster


def all_sweeps(root: Path) -> list[Sweep]:
    """Return the sweeps in a folder of runs."""
    paths = sorted((root / ".sweeps").glob("*/sweep.json"))
    return [Sweep(root, path.parent.name) for path in paths]


def read_record(record_type: type[Record], values: Any) -> Record:
    """Build a dataclass from plain values, ignoring keys that it does not have.

    Raises:
        UserError: A value is missing or has another type.
    """
    require(
        isinstance(values, Mapping),
        f"expected a mapping with the fields of {record_type.__name__}",
        SweepError,
    )
    names = {field.name for field in dataclasses.fields(record_type)}  # type: ignore[arg-type]
    return validate(record_type, {key: values[key] for key in values if key in names})


def is_timestamp(value: object) -> bool:
    """Return whether a value is a time in seconds that the calendar of C can show."""
    return is_number(value) and abs(value) < 1e11


def is_file_name(name: str) -> bool:
    """Return whether a name is that of a file in a folder: no path, and not hidden."""
    return bool(name) and Path(name).name == name and not name.startswith(".")
