"""The status of one run: from its folder, its job, and the events that its jobs recorded."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from backbones.parsing import is_number
from experiments.runtime import run_folder
from sweeps.jobs import slurm
from sweeps.jobs.job_end import end_reason, last_lines
from sweeps.jobs.job_process import host
from sweeps.store.folder import JobBatch, Sweep
from sweeps.store.planned_run import RunRecord

Events = Sequence[Mapping[str, Any]]

WAITS_FOR_WORKER = "waits for a worker"
LIVE_STATES = ("running", "starting", "requeued", "pending")
# In the order of the table, with their colours, legible on dark and on light: blue vanishes on
# black, yellow and cyan on white.
STATES = {
    "running": "green", "starting": "green", "failed": "bold red", "requeued": "magenta",
    "pending": "magenta", "stopped": "magenta", "new": "dim", "done": "",
}  # fmt: skip


@dataclass
class RunStatus:
    """One line of the status table.

    Attributes:
        state: A key of `STATES`.
        step: Step that the run has reached or saved, None if unknown.
        steps: Steps that it has in the end, None for other commands than training.
        speed: Images per second.
        eta: Seconds until it ends, None if unknown.
        work: Seconds that it needs from now on, or once it runs; None if unknown.
        job: Id of its job.
        attempts: How often it has started.
        why: Reason of its state.
        beat: Seconds since its last heartbeat.
        score: Its first scores.
        diverged: Whether it is done, with a loss that has grown or is not finite.
        held: Whether its job is held in Slurm until it is released.
        sweep: Another sweep, if it is a job of that one.
        elapsed: Seconds that its starts have run so far.
        trained: Seconds of these that were spent on steps.
    """

    run: RunRecord
    state: str
    step: int | None = None
    steps: int | None = None
    speed: float | None = None
    eta: float | None = None
    work: float | None = None
    job: str = ""
    node: str = ""
    attempts: int = 0
    why: str = ""
    beat: float | None = None
    score: str = ""
    diverged: bool = False
    held: bool = False
    sweep: str = ""
    elapsed: float = 0.0
    trained: float = 0.0

    @property
    def extended(self) -> bool:
        """Whether an earlier launch has trained it for more steps than it has now."""
        return self.steps is not None and (self.step or 0) > self.steps

    @property
    def live(self) -> bool:
        """Whether a job for it is in a queue or running."""
        return self.state in LIVE_STATES


def finite_number(values: Mapping[str, Any], key: str) -> Any:
    """Return a number from a file of a run; None if the value is not a number."""
    value = values.get(key)
    # No step, speed or time is beyond 1e15.
    return value if is_number(value) and abs(value) < 1e15 else None


def job_status(
    sweep: Sweep, run: RunRecord, batch: JobBatch | None, job: slurm.QueueJob | None, trouble: str
) -> RunStatus:
    """Return the status of a run of a sweep, from its latest submission and its job there.

    `trouble` is why Slurm does not answer, "" if it does.
    """
    row = RunStatus(run, "new", steps=run.steps)
    events = sweep.events(run.name) if batch else []
    starts = [event for event in events if event["event"] == "start"]
    row.attempts, row.elapsed = len(starts), elapsed_seconds(events, 0.0)
    # A run that waits for its parent to train further will replace its older result.
    waits = bool(run.needs) and job is not None and job.live and not job.running
    if sweep.is_done(run) and not waits:
        return _done(row)
    if batch is None or job is None:
        return row
    row.job, row.node = batch.ids.get(run.name, ""), job.node
    row.step = run.saved_step if run.trains else None
    # Starts of this submission: an earlier one may have been killed, and its heartbeat is old.
    times = [start["time"] for start in starts if start.get("batch", batch.name) == batch.name]
    if job.running or (batch.kind == "debug" and _is_alive(events)):
        return _running(row, events, times)
    if job.live:
        return _waiting(row, batch, job, has_started=bool(times))
    last = events[-1] if events else {}
    if last and not times and not _is_of_batch(last, batch, row.job):
        last = {}
    row.state, row.why = _ended(sweep, row, batch, last, events, job, trouble)
    return row


def _waiting(row: RunStatus, batch: JobBatch, job: slurm.QueueJob, has_started: bool) -> RunStatus:
    row.state = "requeued" if has_started else "pending"
    row.why = job.reason.replace("None", "")
    if "held" in job.reason.lower():
        row.held = True
        release = " ".join(["scontrol", *slurm.on_cluster(batch.slurm_cluster), "release"])
        row.why = f"held ({job.reason}): {release} {job.id}"
    return row


def _is_of_batch(event: Mapping[str, Any], batch: JobBatch, job_id: str) -> bool:
    """Return whether an event without a start is of this submission: its job failed early."""
    if batch.kind == "slurm" and event["event"] != "cancelled":
        return bool(job_id) and job_id == event.get("job")
    return bool(event["time"] >= batch.time)


def _is_alive(events: Events) -> bool:
    """Return whether the process that started last, and has not ended, runs on this machine."""
    last = events[-1] if events else {}
    pid = last.get("pid")
    if last.get("event") != "start" or last.get("host") != host() or not isinstance(pid, int):
        return False
    with contextlib.suppress(psutil.Error, ValueError, OverflowError):
        # A younger process has the number only, as after a restart of a container.
        return bool(psutil.Process(pid).create_time() <= last["time"])
    return False


def _done(row: RunStatus) -> RunStatus:
    row.state = "done"
    if not row.run.trains:
        return row
    summary = run_folder.read(Path(row.run.folder) / "summary.json")
    row.step = finite_number(summary, "step")
    row.speed = finite_number(summary, "images_per_s")
    row.trained = finite_number(summary, "wall_s") or 0.0
    # It may have been launched elsewhere, where its events are.
    row.elapsed = max(row.elapsed, finite_number(summary, "session_s") or 0.0)
    row.diverged = run_folder.diverged(row.run.folder)
    scores = summary.get("scores")
    texts = ["diverged"] if row.diverged else []
    for name, value in list(scores.items())[:2] if isinstance(scores, dict) else ():
        if isinstance(value, int | float):
            texts.append(f"{name} {value:.4g}")
    row.score = "  ".join(texts)
    return row


def _running(row: RunStatus, events: Events, start_times: Sequence[float]) -> RunStatus:
    row.state = "running" if start_times and not row.run.trains else "starting"
    if not start_times:
        return row
    now = time.time()
    row.elapsed = elapsed_seconds(events, now)
    heartbeat = run_folder.read(Path(row.run.folder) / "status.json") if row.run.trains else {}
    beat_time = finite_number(heartbeat, "time") or 0.0
    if beat_time < max(start_times):  # of an earlier attempt
        return row
    row.state, row.beat = "running", max(0.0, now - beat_time)
    row.step = finite_number(heartbeat, "step")
    row.speed = finite_number(heartbeat, "images_per_s")
    eta = finite_number(heartbeat, "eta_s")
    row.eta = None if eta is None else max(0.0, eta - row.beat)
    if row.step is not None and row.step == row.steps:
        row.why, row.eta = "last evaluation", row.eta or None
    return row


def _ended(
    sweep: Sweep,
    row: RunStatus,
    batch: JobBatch,
    last: Mapping[str, Any],
    events: Events,
    job: slurm.QueueJob,
    trouble: str,
) -> tuple[str, str]:
    """Return the state and the reason of a run without a live job.

    `last` is the last event that its job noted, {} if it noted none.
    """
    how = last.get("how")
    if how in ("failed", "given up"):
        event = _failure(last, events)
        place = f"  ({event['where']})" if event.get("where") else ""
        return "failed", " ".join(str(event.get("error", "")).split()) + place
    if how == "done":
        why = "more steps requested" if row.run.trains else "its run was trained further"
        return "stopped", why
    if last.get("event") == "cancelled" or job.state == "CANCELLED":
        return "stopped", "cancelled"
    if how == "stopped":
        return "stopped", str(last.get("signal", ""))
    if trouble and batch.kind == "slurm":
        return "starting" if row.attempts else "pending", "unknown: Slurm does not answer"
    if not batch.ids and not last:
        return "new", "its submission was cut off"
    if last.get("event") != "start" and not job.state:
        # A task that is cancelled while it waits leaves no trace where there is no accounting.
        return "stopped", "its job is gone"
    message, slurm_lines = last_lines(sweep.log(batch, row.run.name, "err"))
    if batch.runs_per_task > 1:  # Slurm's lines are in the log of the task
        slurm_lines = last_lines(sweep.task_log(batch, row.run.name, "err"))[1]
    reason = end_reason(job, slurm_lines)
    if reason.startswith("killed"):  # then the log does not say why
        message = ""
    message = f": {message}" if message else ""
    return "failed", f"{reason}, saved step {row.step or 0}{message}"


def _failure(last: Mapping[str, Any], events: Events) -> Mapping[str, Any]:
    """Return the event of rank 0, since other ranks fail because the first one does."""
    ends = [end for end in events if end["event"] == "end" and end.get("rank") == 0]
    if ends and "error" in ends[-1] and ends[-1].get("job") == last.get("job"):
        return ends[-1]
    return last


def elapsed_seconds(events: Events, now: float) -> float:
    """Return the seconds from starts to ends, or to `now`; a killed start has no end."""
    total, started_at = 0.0, None
    for event in events:
        if event["event"] == "start":
            started_at = event["time"]
        elif event["event"] == "end" and started_at is not None:
            total += max(0.0, event["time"] - started_at)
            started_at = None
    return total if started_at is None else total + max(0.0, now - started_at)
