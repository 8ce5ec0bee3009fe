"""Launch and retry: read the status and submit under one lock, so that nothing runs twice."""

from collections.abc import Mapping, Sequence

from experiments.runtime.locks import locked
from sweeps.jobs.job import run_here
from sweeps.plan.grid import Grid
from sweeps.status.status import require_queue, statuses
from sweeps.store.folder import Sweep
from sweeps.store.planned_run import PlannedRun
from sweeps.store.resource_options import Resources
from sweeps.submission.live_jobs import end_replaced, set_throttles
from sweeps.submission.missing import Print, Runs, check_entries, find_failed, find_missing
from sweeps.submission.submit import submit


def launch(
    sweep: Sweep, grid: Grid, planned: Sequence[PlannedRun], resources: Resources,
    say: Print = print, throttle: int | None = None,
) -> Runs | None:  # fmt: skip
    """Submit the planned runs that are neither done, live nor failed.

    `throttle` is a new limit for arrays of these runs that are already in the queue.

    Returns:
        Runs that failed in this process; None if there was nothing to submit.

    Raises:
        SweepError: The scheduler refuses, or a run's resources are invalid; nothing is noted as
            submitted then.
    """
    with locked(sweep.locked_folder, wait_s=60.0):
        runs, noted = find_missing(sweep, planned, say)
        if throttle is not None:
            set_throttles(sweep, planned, throttle, say)
        with sweep.undo_if_refused():
            sweep.add(grid.title, noted)
            if not runs:
                say("nothing to submit")
                return None
            batch = submit(sweep, runs, resources, say)
    return run_here(sweep, runs, batch, say) if batch.kind == "debug" else []


def retry(
    sweep: Sweep, runs: Sequence[PlannedRun], resources: Resources, say: Print = print,
    resources_by_run: Mapping[str, Resources] | None = None,
) -> Runs | None:  # fmt: skip
    """Submit the failed and stopped runs among `runs` again; each resumes from its last checkpoint.

    Tables of their results are recomputed; a queued or running job of such a table is replaced.
    `resources_by_run` as in `submit`. Returns what `launch` returns.

    Raises:
        SweepError: A run's entry point, from the sweep's file, is not one of this suite; or the
            scheduler refuses.
    """
    check_entries(sweep, runs)
    with locked(sweep.locked_folder, wait_s=60.0):
        latest = sweep.latest_batches()
        rows, trouble = statuses(sweep)
        require_queue(trouble)
        selected = find_failed(runs, rows, say)
        if not selected:
            say("nothing has failed or stopped")
            return None
        with sweep.undo_if_refused():
            batch = submit(sweep, selected, resources, say, resources_by_run)
        names = {run.name for run in selected}
        end_replaced(sweep, names, rows, latest, say)
    return run_here(sweep, selected, batch, say) if batch.kind == "debug" else []
