"""Status of every run of a sweep, with jobs of other sweeps and estimates of when they end."""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from routing.errors import require
from sweeps import SweepError
from sweeps.jobs import pool, slurm
from sweeps.plan.dependencies import display_name
from sweeps.status.run_status import STATES, WAITS_FOR_WORKER, RunStatus, job_status
from sweeps.store.folder import JobBatch, Sweep, all_sweeps
from sweeps.store.planned_run import RunRecord

# Why a run that was launched is not started, also by a retry.
PARENT_DIVERGED = "its parent has diverged"
Jobs = dict[str, slurm.QueueJob]
Queue = Callable[[str], tuple[Jobs, str]]


def statuses(
    sweep: Sweep, runs: Iterable[RunRecord] | None = None, queue: Queue | None = None
) -> tuple[list[RunStatus], str]:
    """Return the status of some or all runs, and what is wrong with the scheduler ("" if nothing).

    A run that is a job of another sweep only has its status there. `queue` is `cached_queue()`, to
    share between several sweeps.
    """
    queue = queue or cached_queue()
    latest = sweep.latest_batches()
    jobs, trouble = find_jobs(sweep, latest, queue)
    all_runs = sweep.runs()
    selected = all_runs if runs is None else {run.name: run for run in runs}
    # All runs, since the time that one needs is estimated from the others.
    rows = {}
    for name, run in (all_runs | selected).items():
        batch, job = latest.get(name), jobs.get(name)
        rows[name] = job_status(sweep, sweep.resolved(run), batch, job, trouble)
    for other in all_sweeps(sweep.root):
        if other.name != sweep.name:
            other_trouble = _look_in_other_sweep(other, rows, queue)
            trouble = trouble or other_trouble
    explain_waiting(rows)
    estimate_etas(rows)
    shown = [row for name, row in rows.items() if name in selected]
    order = list(STATES)
    return sorted(shown, key=lambda row: order.index(row.state)), trouble


def cached_queue() -> Queue:
    """Return a function that asks each Slurm cluster once: its jobs by id, and what is wrong."""

    @functools.cache
    def queue(slurm_cluster: str) -> tuple[Jobs, str]:
        try:
            return slurm.queue(slurm_cluster), ""
        except SweepError as error:
            return {}, str(error)

    return queue


def require_queue(trouble: str) -> None:
    """Raise `SweepError` if the scheduler did not answer."""
    require(
        not trouble, f"{trouble} (which runs are live is unknown without the queue)", SweepError
    )


def _look_in_other_sweep(other: Sweep, rows: dict[str, RunStatus], queue: Queue) -> str:
    """Replace rows of runs that are live jobs of another sweep; return the scheduler's trouble."""
    batches = {}
    if any(not row.live and row.state != "done" for row in rows.values()):
        for name, batch in other.latest_batches().items():
            row = rows.get(name)
            if row is None or row.live or row.state == "done" or row.run.has_output:
                continue
            batches[name] = batch
    jobs, trouble = find_jobs(other, batches, queue, history=False)
    for name, batch in batches.items():
        if jobs[name].live:
            rows[name] = job_status(other, rows[name].run, batch, jobs[name], trouble)
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
        # The id is that of another job where it was planted, or after Slurm was installed again.
        if job is None or not _is_of_batch(sweep, batch, job):
            job = ended.get(ids[run], slurm.QueueJob(ids[run], ""))
        if job.live and pool.has_left_task(sweep, batch, run, job.running):
            job = replace(job, state="ENDED")
        jobs[run] = job
    return jobs, trouble


def _is_of_batch(sweep: Sweep, batch: JobBatch, job: slurm.QueueJob) -> bool:
    """Return whether a job in the queue is one of a submission: by its name and where it works."""
    return job.name == batch.name and launch_of(sweep, job) != ""


def launch_of(sweep: Sweep, job: slurm.QueueJob) -> str:
    """Return the launch of a sweep in whose folder a job works; "" for other jobs.

    Slurm says so, not a file in the folder of runs.
    """
    if not job.folder:
        return ""
    launches, folder = _resolved(str(sweep.launches)), _resolved(job.folder)
    return folder.relative_to(launches).parts[0] if launches in folder.parents else ""


@functools.lru_cache(maxsize=4096)
def _resolved(path: str) -> Path:
    return Path(path).resolve()


def adopt(sweep: Sweep, batches: Iterable[JobBatch], queued: Jobs) -> None:
    """Give a batch on Slurm whose submission was cut off the ids of the jobs with its name."""
    for batch in batches:
        if batch.ids:
            continue
        # Tasks of an array are numbered in the order of the batch's runs; some may have ended.
        ids: dict[str, str] = {}
        for job_id, job in queued.items():
            if _is_of_batch(sweep, batch, job):
                index = int(job_id.partition("_")[2] or 0)
                for names in batch.tasks()[index : index + 1]:
                    ids |= dict.fromkeys(names, job_id)
        if ids:
            batch.ids.update(ids)
            sweep.submitted(batch.name, ids, "found in the queue")


def explain_waiting(rows: Mapping[str, RunStatus]) -> None:
    """Say in the status of runs which other runs they wait for, or which failed before them."""
    for row in rows.values():
        unfinished = []
        for name in row.run.needs:
            other = rows.get(name)
            if other is None:
                continue
            is_ready = other.state == "done" and not other.diverged
            is_unfinished_parent = name == row.run.parent and not is_ready
            if other.live or is_unfinished_parent:
                unfinished.append(other)
        if not unfinished or row.sweep or row.state == "done":
            continue
        if row.state == "pending" and not row.held:
            first = unfinished[0].run
            text = f"{len(unfinished)} runs"
            if len(unfinished) == 1:
                text = first.label or display_name(first)
            row.why = f"waits for {text}"
        # New with a reason: it was submitted, but `cluster=debug` left it out.
        elif not row.attempts and not row.live and (row.state != "new" or row.why):
            parent = unfinished[0]
            row.state, row.why = "stopped", f"its parent is {parent.state}"
            if parent.diverged:
                row.why = PARENT_DIVERGED


def estimate_etas(rows: Mapping[str, RunStatus]) -> None:
    """Set `work` of live runs that train, and `eta` of those that run or wait for others.

    A run that says nothing yet needs its steps at the mean rate of those that run, or that are
    done. Each row comes after the rows that its run waits for.
    """
    running, done = list[float](), list[float]()  # seconds per step
    for row in rows.values():
        remaining = (row.steps or 0) - (row.step or 0)
        if row.eta and remaining > 0:
            running.append(row.eta / remaining)
        elif row.state == "done" and row.trained and row.step:
            done.append(row.trained / row.step)
    rates = running or done
    for row in rows.values():
        if not row.live or row.held or row.steps is None:
            continue
        if row.eta is not None:
            row.work = row.eta
        elif rates:
            row.work = fmean(rates) * max(0, row.steps - (row.step or 0))
            waits_for = [rows[name] for name in row.run.needs if name in rows]
            etas = [other.eta for other in waits_for if other.live]
            if row.state == "starting" or etas:
                known = [eta for eta in etas if eta is not None]
                row.eta = max(known, default=0.0) + row.work if len(known) == len(etas) else None
