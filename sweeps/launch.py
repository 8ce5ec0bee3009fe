"""Launch: look, decide and submit under one lock, so that nothing runs twice."""

from collections.abc import Sequence

from experiments.runtime.locks import locked
from sweeps.debug import run_here
from sweeps.folder import Sweep
from sweeps.grid import Grid
from sweeps.live_jobs import set_throttles
from sweeps.missing import Runs, find_missing
from sweeps.planned_run import PlannedRun
from sweeps.resource_options import Resources
from sweeps.submit import Print, submit


def launch(
    sweep: Sweep, grid: Grid, planned: Sequence[PlannedRun], resources: Resources,
    say: Print = print, throttle: int | None = None,
) -> Runs | None:  # fmt: skip
    """Submit the planned runs that are neither done, live nor failed.

    Args:
        sweep: The sweep.
        grid: Its grid.
        planned: The runs of the grid, each after the run that it starts from.
        resources: Where to run them.
        say: Prints a line.
        throttle: New limit for arrays of these runs that are already in the queue.

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
            batch = submit(sweep, runs, resources, grid.code, say)
    return run_here(sweep, runs, batch, say)
