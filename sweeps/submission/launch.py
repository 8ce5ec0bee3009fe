"""Launch: read the status and submit under one lock, so that nothing runs twice."""

from collections.abc import Sequence
from dataclasses import replace

from experiments.runtime.console import show
from experiments.runtime.locks import locked
from sweeps.jobs.job import run_here
from sweeps.plan.grid import Grid
from sweeps.status.status import statuses
from sweeps.store.folder import Launch, Sweep
from sweeps.store.planned_run import PlannedRun
from sweeps.store.resource_options import Resources
from sweeps.submission.live_jobs import end_replaced, set_throttles
from sweeps.submission.missing import Print, Runs, check_launched, find_missing
from sweeps.submission.submit import submit


def launch(
    sweep: Sweep, grid: Grid, planned: Sequence[PlannedRun], resources: Resources,
    say: Print = show, throttle: int | None = None, typed: Launch | None = None,
    retry: bool = False,
) -> Runs | None:  # fmt: skip
    """Submit the planned runs that are neither done nor live; failed ones only with `retry`.

    With `retry` a queued or running job of a table that reads retried runs is replaced. `throttle`
    is a new limit for arrays of these runs that are already in the queue. `typed` is stored.

    Returns:
        Runs that failed in this process; None if there was nothing to submit.

    Raises:
        SweepError: The scheduler refuses, or a run's resources are invalid; nothing is noted as
            submitted then. Or runs to retry were not launched.
    """
    sweep.open()
    if retry:
        check_launched(sweep, planned)
    with locked(sweep.locked_folder, wait_s=60.0):
        planned = _after_all(sweep, planned)
        runs, noted = find_missing(sweep, planned, say, retry=retry)
        if throttle is not None:
            set_throttles(sweep, planned, throttle, say)
        latest, before = sweep.latest_batches(), statuses(sweep)[0] if retry else []
        with sweep.undo_if_refused():
            sweep.add(grid.title, noted, None if retry else typed)
            if not runs:
                say("nothing has failed or is missing" if retry else "nothing to submit")
                return None
            batch = submit(sweep, runs, resources, say)
        if retry:
            end_replaced(sweep, {run.name for run in runs}, before, latest, say)
    return run_here(sweep, runs, batch, say) if batch.kind == "debug" else []


def _after_all(sweep: Sweep, planned: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Let tables wait for the runs of earlier launches too, not for those of this one alone."""
    stored, runs = sweep.runs(), []
    for run in planned:
        if run.after and run.name in stored:
            earlier = [name for name in stored[run.name].after if name in stored]
            run = replace(run, after=list(dict.fromkeys([*run.after, *earlier])))
        runs.append(run)
    return runs
