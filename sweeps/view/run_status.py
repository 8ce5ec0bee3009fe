"""Where every run stands: from its folder, the jobs' own records, and two Slurm calls."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sweeps import SweepError, run_folder
from sweeps.jobs import pool, slurm
from sweeps.jobs.sweep_folder import JobBatch, Sweep, all_sweeps
from sweeps.planning.planned_runs import PlannedRun

# In the order of the table.
STATES = ("running", "starting", "failed", "requeued", "pending", "stopped", "new", "done")
# Beyond it no step, speed or time is one; NaN is not below it.
_LARGEST = 1e15
LIVE = ("running", "starting", "requeued", "pending")


@dataclass
class RunStatus:
    """One line of the status table."""

    run: PlannedRun
    state: str
    step: int | None = None
    steps: int | None = None
    speed: float | None = None
    eta: float | None = None
    job: str = ""
    node: str = ""
    attempts: int = 0
    why: str = ""
    beat: float | None = None  # seconds since the last heartbeat
    score: str = ""

    @property
    def live(self) -> bool:
        """Whether a job for it is in a queue or running."""
        return self.state in LIVE


@dataclass
class JobStates:
    """What the schedulers say now."""

    queued: dict[str, slurm.QueueJob] = field(default_factory=dict)
    known: dict[str, slurm.QueueJob] = field(default_factory=dict)  # by accounting
    pools: dict[str, dict[str, str]] = field(default_factory=dict)  # by batch and run
    trouble: str = ""


def statuses(sweep: Sweep, runs: Iterable[PlannedRun] | None = None) -> tuple[list[RunStatus], str]:
    """Return where runs are, and what is wrong with the scheduler ("" if nothing)."""
    latest = sweep.latest_batches()
    jobs = ask(sweep, latest)
    chosen = list(sweep.runs().values() if runs is None else runs)
    rows = [_status(sweep, run, latest.get(run.name), jobs) for run in chosen]
    return sorted(rows, key=lambda row: STATES.index(row.state)), jobs.trouble


def ask(sweep: Sweep, latest: Mapping[str, JobBatch], history: bool = True) -> JobStates:
    """Ask Slurm (two calls at most) and the pools about the latest jobs of runs."""
    jobs = JobStates()
    found = {id(batch): batch for batch in latest.values()}.values()
    if any(batch.kind == "slurm" for batch in found):
        try:
            jobs.queued = slurm.queue()
        except SweepError as error:
            jobs.trouble = str(error)
        adopt(sweep, found, jobs.queued)
        ids = [b.ids[r] for r, b in latest.items() if b.kind == "slurm" and r in b.ids]
        gone = [i for i in ids if i not in jobs.queued]
        jobs.known = slurm.history(gone) if history and gone and not jobs.trouble else {}
    jobs.pools = {b.name: pool.states(sweep, b.name) for b in found if b.kind == "local"}
    return jobs


def adopt(sweep: Sweep, batches: Iterable[JobBatch], queued: dict[str, slurm.QueueJob]) -> None:
    """Give a batch whose submission was cut off the ids of the jobs that bear its name."""
    for batch in batches:
        if batch.kind != "slurm" or batch.ids:
            continue
        mine = [j.id for j in queued.values() if j.name == batch.name]
        if mine:
            mine.sort(key=lambda i: [int(n) for n in i.split("_")])
            # Arrays are filled in the order of the batch's runs.
            ids = dict(zip(batch.runs, mine, strict=False))
            batch.ids.update(ids)
            sweep.submitted(batch.name, ids, "found in the queue")


def live_anywhere(root: Path) -> dict[str, str]:
    """Return the runs below `root` that have a live job in any sweep, with that sweep's name."""
    found = {}
    for sweep in all_sweeps(root):
        latest = sweep.latest_batches()
        jobs = ask(sweep, latest, history=False)
        if jobs.trouble:
            raise SweepError(f"{jobs.trouble} (without the queue nobody knows which runs are live)")
        for run, batch in latest.items():
            if _job_state(batch, run, jobs)[0] in ("PENDING", "RUNNING"):
                found[run] = sweep.name
    return found


def _job_state(batch: JobBatch, run: str, jobs: JobStates) -> tuple[str, slurm.QueueJob | None]:
    """Return PENDING, RUNNING, another Slurm state, or "" for a run's latest job."""
    if batch.kind != "slurm":
        return jobs.pools.get(batch.name, {}).get(run, ""), None
    job = jobs.queued.get(batch.ids.get(run, ""))
    # Another job may bear the same id after a cluster was set up anew: the name tells.
    if job is not None and job.name == batch.name:
        if job.live:
            return ("RUNNING" if job.state in slurm.RUNNING else "PENDING"), job
        return job.state, job
    job = jobs.known.get(batch.ids.get(run, ""))
    return (job.state if job else ""), job


def _status(sweep: Sweep, run: PlannedRun, batch: JobBatch | None, jobs: JobStates) -> RunStatus:
    row = RunStatus(run, "new", steps=run.steps)
    events = sweep.attempts(run.name).events() if batch else []
    row.attempts = sum(e["event"] == "start" for e in events)
    if sweep.is_done(run):
        return _done(row)
    if batch is None:
        return row
    row.job = batch.ids.get(run.name, "")
    found, job = _job_state(batch, run.name, jobs)
    row.node = job.node if job else ""
    if found == "RUNNING":
        return _running(row, events)
    row.step = run.saved_step if run.trains else None
    if found == "PENDING":
        row.state = "requeued" if row.attempts else "pending"
        row.why = "waits for a worker" if job is None else job.reason.replace("None", "")
        return row
    return _ended(sweep, row, batch, events, found, job, jobs.trouble)


def number(values: Mapping[str, Any], key: str) -> Any:
    """Return a finite number of a run's own file, None where something else stands there."""
    value = values.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value if abs(value) < _LARGEST else None


def _done(row: RunStatus) -> RunStatus:
    row.state = "done"
    if row.run.trains:
        summary = run_folder.read(Path(row.run.folder) / "summary.json")
        row.step, row.speed = number(summary, "step"), number(summary, "images_per_s")
        scores = summary.get("scores")
        if isinstance(scores, dict):
            row.score = "  ".join(
                f"{key} {value:.4g}"
                for key, value in list(scores.items())[:2]
                if isinstance(value, int | float)
            )
    return row


def _running(row: RunStatus, events: list[dict[str, Any]]) -> RunStatus:
    run, started = row.run, max((e["time"] for e in events if e["event"] == "start"), default=None)
    row.state = "starting" if started is None or run.trains else "running"
    if started is None or not run.trains:
        return row
    beat = run_folder.read(Path(run.folder) / "status.json")
    now = number(beat, "time") or 0.0
    if now < started:  # of an earlier attempt
        row.step = run.saved_step
        return row
    row.state, row.beat = "running", max(0.0, time.time() - now)
    row.step, row.speed = number(beat, "step"), number(beat, "images_per_s")
    row.eta = number(beat, "eta_s")
    return row


def _ended(
    sweep: Sweep, row: RunStatus, batch: JobBatch, events: list[dict[str, Any]], found: str,
    job: slurm.QueueJob | None, trouble: str,
) -> RunStatus:  # fmt: skip
    last = events[-1] if events else {}
    of_rank_0 = [e for e in events if e["event"] == "end" and e.get("rank") == 0]
    if last.get("event") in ("retry", "cancelled"):
        cancelled, last = last["event"] == "cancelled", {}
    else:
        cancelled = found == "CANCELLED"
    if last.get("how") in ("failed", "given up"):
        # Other ranks fail because the first one does.
        told = next((e for e in of_rank_0[-1:] if e.get("how") in ("failed", "given up")), last)
        row.state, where = "failed", told.get("where")
        row.why = " ".join(str(told.get("error", "")).split()) + (f"  ({where})" if where else "")
    elif last.get("how") == "done":
        row.why = "more steps are wanted"
    elif cancelled or last.get("how") == "stopped":
        row.state, row.why = "stopped", "cancelled" if cancelled else str(last.get("signal", ""))
    elif trouble and batch.kind == "slurm":
        row.state = "starting" if row.attempts else "pending"
        row.why = "unknown: Slurm does not answer"
    elif not batch.ids and not events:
        row.state, row.why = "new", "its submission was cut off"
    elif not last and not found:
        # A task that is cancelled while it waits leaves no trace where there is no accounting.
        row.state, row.why = "stopped", "its job is gone"
    else:
        exit_code = f" {job.exit}" if job and job.exit not in ("", "0:0") else ""
        said = tail(sweep.log(batch, row.run.name, "err"))
        row.state, row.why = "failed", f"{found or 'its job is gone'}{exit_code}, saved step "
        row.why += f"{row.step or 0}" + (f": {said}" if said else "")
    return row


def tail(path: Path | None, size: int = 4096) -> str:
    """Return the last line of a log that says something, Slurm's own remarks last."""
    if path is None:
        return ""
    try:
        with path.open("rb") as handle:
            handle.seek(max(0, path.stat().st_size - size))
            lines = handle.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    said = [line.strip() for line in lines if line.strip()]
    own = [line for line in said if not line.startswith(("srun:", "slurmstepd:", "submitit "))]
    return (own or said or [""])[-1][:300]
