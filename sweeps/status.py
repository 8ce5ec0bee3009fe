"""Status of every run of a sweep, with jobs of other sweeps and estimates of when they end."""

import functools
from collections.abc import Iterable
from dataclasses import replace

from routing.errors import require
from sweeps import SweepError
from sweeps.dependencies import explain_waiting
from sweeps.eta import estimate_etas
from sweeps.folder import Sweep, all_sweeps
from sweeps.job_status import job_status
from sweeps.planned_run import PlannedRun
from sweeps.run_status import STATES, RunStatus
from sweeps.scheduler import Queue, find_jobs, slurm_queue


def statuses(
    sweep: Sweep, runs: Iterable[PlannedRun] | None = None, queue: Queue | None = None
) -> tuple[list[RunStatus], str]:
    """Return the status of runs, and what is wrong with the scheduler ("" if nothing).

    A run that is a job of another sweep only has its status there.

    Args:
        sweep: The sweep.
        runs: Some of its runs, None for all.
        queue: `cached_queue()`, where several sweeps are looked at.
    """
    queue = queue or cached_queue()
    latest = sweep.latest_batches()
    jobs, trouble = find_jobs(sweep, latest, queue)
    all_runs = sweep.runs()
    selected = all_runs if runs is None else {run.name: run for run in runs}
    # All runs are looked at, since the estimate of one is made of the others.
    rows = {}
    for name, run in (all_runs | selected).items():
        folder = sweep.resolution(name) if run.deferred else ""
        run = replace(run, folder=folder or run.folder)
        rows[name] = job_status(sweep, run, latest.get(name), jobs.get(name), trouble)
    for other in all_sweeps(sweep.root):
        if other.name != sweep.name:
            other_trouble = _look_in_other_sweep(other, rows, queue)
            trouble = trouble or other_trouble
    explain_waiting(rows)
    estimate_etas(list(rows.values()), latest)
    shown = [row for name, row in rows.items() if name in selected]
    order = list(STATES)
    return sorted(shown, key=lambda row: order.index(row.state)), trouble


def cached_queue() -> Queue:
    """Return a function that asks each Slurm cluster once for its queue."""
    return functools.cache(slurm_queue)


def require_queue(trouble: str) -> None:
    """Raise `SweepError` if the scheduler did not answer."""
    require(
        not trouble, f"{trouble} (without the queue nobody knows which runs are live)", SweepError
    )


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
            rows[name] = job_status(other, rows[name].run, batch, jobs[name], trouble)
            rows[name].sweep, rows[name].why = other.name, f"queued by sweep {other.name}"
    return trouble
