"""Status of every run: from its folder, the jobs' own records, and two Slurm calls."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from experiments.runtime import run_folder
from sweeps import SweepError, pool, require, slurm
from sweeps.dependencies import explain_waiting
from sweeps.eta import estimate_etas
from sweeps.folder import JobBatch, Sweep, all_sweeps
from sweeps.job import host
from sweeps.job_end import end_reason, last_lines
from sweeps.planned_run import PlannedRun
from sweeps.run_status import STATES, WAITS_FOR_WORKER, RunStatus, finite_number

Jobs = dict[str, slurm.QueueJob]
Queue = Callable[[str], tuple[Jobs, str]]
Events = Sequence[Mapping[str, Any]]


def slurm_queue(slurm_cluster: str) -> tuple[Jobs, str]:
    """Return a cluster's queued jobs by id, and why they are unknown ("" if they are known)."""
    try:
        return slurm.queue(slurm_cluster), ""
    except SweepError as error:
        return {}, str(error)


def statuses(
    sweep: Sweep, runs: Iterable[PlannedRun] | None = None, queue: Queue | None = None
) -> tuple[list[RunStatus], str]:
    """Return the status of runs, and what is wrong with the scheduler ("" if nothing).

    A run that is a job of another sweep only has its status there.

    Args:
        sweep: The sweep.
        runs: Some of its runs, None for all.
        queue: `slurm_queue`, cached where several sweeps are looked at.
    """
    queue = queue or functools.cache(slurm_queue)
    latest = sweep.latest_batches()
    jobs, trouble = find_jobs(sweep, latest, queue)
    all_runs = sweep.runs()
    selected = all_runs if runs is None else {run.name: run for run in runs}
    # All runs are looked at, since the estimate of one is made of the others.
    rows = {}
    for name, run in (all_runs | selected).items():
        folder = sweep.resolution(name) if run.deferred else ""
        run = replace(run, folder=folder or run.folder)
        rows[name] = _status(sweep, run, latest.get(name), jobs.get(name), trouble)
    for other in all_sweeps(sweep.root):
        if other.name != sweep.name:
            other_trouble = _look_in_other_sweep(other, rows, queue)
            trouble = trouble or other_trouble
    explain_waiting(rows)
    estimate_etas(list(rows.values()), latest)
    shown = [row for name, row in rows.items() if name in selected]
    order = list(STATES)
    return sorted(shown, key=lambda row: order.index(row.state)), trouble


def require_queue(trouble: str) -> None:
    """Raise `SweepError` if the scheduler did not answer."""
    require(not trouble, f"{trouble} (without the queue nobody knows which runs are live)")


def _look_in_other_sweep(other: Sweep, rows: dict[str, RunStatus], queue: Queue) -> str:
    """Replace rows of runs that are live jobs of another sweep; return the scheduler's trouble."""
    batches = {}
    if any(not row.live and row.state != "done" for row in rows.values()):
        for name, batch in other.latest_batches().items():
            if name in rows and not rows[name].live and rows[name].state != "done":
                batches[name] = batch
    jobs, trouble = find_jobs(other, batches, queue, history=False)
    for name, batch in batches.items():
        if jobs[name].live:
            rows[name] = _status(other, rows[name].run, batch, jobs[name], trouble)
            rows[name].sweep, rows[name].why = other.name, f"queued by sweep {other.name}"
    return trouble


def find_jobs(
    sweep: Sweep, latest: Mapping[str, JobBatch], queue: Queue, history: bool = True
) -> tuple[Jobs, str]:
    """Return the jobs of runs by run, from Slurm (two calls per cluster) and the pools."""
    jobs: Jobs = {}
    trouble = ""
    pools: dict[str, dict[str, str]] = {}
    by_cluster: dict[str, dict[str, JobBatch]] = {}
    for run, batch in latest.items():
        if batch.kind == "slurm":
            by_cluster.setdefault(batch.slurm_cluster, {})[run] = batch
            continue
        state = ""
        if batch.kind == "local":
            if batch.name not in pools:
                pools[batch.name] = pool.states(sweep, batch.name)
            state = pools[batch.name].get(run, "")
        jobs[run] = slurm.QueueJob(batch.ids.get(run, ""), state, WAITS_FOR_WORKER)
    for cluster, batches in sorted(by_cluster.items()):
        cluster_jobs, cluster_trouble = _find_slurm_jobs(sweep, cluster, batches, queue, history)
        jobs |= cluster_jobs
        trouble = trouble or cluster_trouble
    return jobs, trouble


def _find_slurm_jobs(
    sweep: Sweep, cluster: str, latest: Mapping[str, JobBatch], queue: Queue, history: bool
) -> tuple[Jobs, str]:
    """Return the jobs of runs whose latest batches are on one cluster of Slurm, by run."""
    queued, trouble = queue(cluster)
    adopt(sweep, {batch.name: batch for batch in latest.values()}.values(), queued)
    ids = {run: batch.ids.get(run, "") for run, batch in latest.items()}
    gone = [job_id for job_id in ids.values() if job_id not in queued]
    ended = slurm.history(gone, cluster) if history and any(gone) and not trouble else {}
    jobs = {}
    for run, batch in latest.items():
        job = queued.get(ids[run])
        # After a cluster was set up anew another job may have the same id: its name differs.
        if job is None or job.name != batch.name:
            job = ended.get(ids[run], slurm.QueueJob(ids[run], ""))
        jobs[run] = job
    return jobs, trouble


def adopt(sweep: Sweep, batches: Iterable[JobBatch], queued: Jobs) -> None:
    """Give a batch whose submission was cut off the ids of the jobs with its name."""
    for batch in batches:
        if batch.kind != "slurm" or batch.ids:
            continue
        # Tasks of an array are numbered in the order of the batch's runs; some may have ended.
        ids: dict[str, str] = {}
        for job_id, job in queued.items():
            if job.name == batch.name:
                index = int(job_id.partition("_")[2] or 0)
                ids |= dict.fromkeys(batch.runs[index : index + 1], job_id)
        if ids:
            batch.ids.update(ids)
            sweep.submitted(batch.name, ids, "found in the queue")


def _status(
    sweep: Sweep, run: PlannedRun, batch: JobBatch | None, job: slurm.QueueJob | None, trouble: str
) -> RunStatus:
    row = RunStatus(run, "new", steps=run.steps)
    events = sweep.events(run.name) if batch else []
    starts = [event for event in events if event["event"] == "start"]
    row.attempts, row.elapsed = len(starts), elapsed_seconds(events, 0.0)
    # The older result of a run that waits for its parent to go on is not its last one.
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
        return _waiting(row, batch, job)
    last = events[-1] if events else {}
    if last and not times and not _is_of_batch(last, batch, row.job):
        last = {}
    row.state, row.why = _ended(sweep, row, batch, last, events, job, trouble)
    return row


def _waiting(row: RunStatus, batch: JobBatch, job: slurm.QueueJob) -> RunStatus:
    row.state = "requeued" if row.attempts else "pending"
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
    scores = summary.get("scores")
    texts = []
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
        return "failed", _failure(last, events)
    if how == "done":
        return "stopped", "more steps are wanted" if row.run.trains else "its run has gone on since"
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
    reason = end_reason(job, slurm_lines)
    # The log of a run that a signal ended does not say why.
    message = f": {message}" if message and not reason.startswith("killed") else ""
    return "failed", f"{reason}, saved step {row.step or 0}{message}"


def _failure(last: Mapping[str, Any], events: Events) -> str:
    """Return the error of rank 0, since other ranks fail because the first one does."""
    event = last
    ends = [end for end in events if end["event"] == "end" and end.get("rank") == 0]
    if ends and "error" in ends[-1] and ends[-1].get("job") == last.get("job"):
        event = ends[-1]
    place = f"  ({event['where']})" if event.get("where") else ""
    return " ".join(str(event.get("error", "")).split()) + place


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
