"""Launch and retry: look, decide and submit under one lock, so that nothing runs twice."""

from collections.abc import Sequence

from experiments.runtime.locks import locked
from sweeps import require
from sweeps.debug import run_here
from sweeps.folder import Sweep
from sweeps.grid import ENTRIES, Grid
from sweeps.missing import Runs, find_failed, find_missing
from sweeps.planned_run import PlannedRun
from sweeps.resources import Resources
from sweeps.submit import Print, set_throttles, submit, undo_if_refused


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
        SweepError: The scheduler refuses; nothing is noted as submitted then.
    """
    with locked(sweep.locked_folder, wait_s=60.0):
        runs, noted = find_missing(sweep, planned, say)
        if throttle is not None:
            set_throttles(sweep, planned, throttle, say)
        with undo_if_refused(sweep):
            sweep.add(grid.title, noted)
            if not runs:
                say("nothing to submit")
                return None
            _forget_resolutions(sweep, runs)
            batch = submit(sweep, runs, resources, grid.code, say)
    return run_here(sweep, runs, batch, say)


def _forget_resolutions(sweep: Sweep, runs: Sequence[PlannedRun]) -> None:
    """Let runs find their folder again: the weights of their parents may be others by then."""
    for run in runs:
        sweep.forget_resolution(run.name)


def retry(
    sweep: Sweep, runs: Sequence[PlannedRun], resources: Resources, say: Print = print,
    grid: Grid | None = None,
) -> Runs | None:  # fmt: skip
    """Submit failed and stopped runs of a sweep again; each resumes from its last checkpoint.

    Args:
        sweep: The sweep.
        runs: Which of its runs.
        resources: Where to run them.
        say: Prints a line.
        grid: Its grid, if that is one in Python.

    Returns:
        What `launch` returns.

    Raises:
        SweepError: A run's entry point, from the sweep's file, is neither in this suite nor in
            `grid`; or the scheduler refuses.
    """
    entries = {*ENTRIES.values(), *(grid.commands.values() if grid else ())}
    foreign = {run.entry for run in runs} - entries
    require(
        not foreign,
        f"sweep {sweep.name} runs {', '.join(sorted(foreign))}, a command of a grid in Python; "
        f"type python -m sweeps retry PATH/{sweep.name}.py",
    )
    with locked(sweep.locked_folder, wait_s=60.0):
        selected = find_failed(sweep, runs, say)
        if not selected:
            say("nothing has failed or stopped")
            return None
        with undo_if_refused(sweep):
            _forget_resolutions(sweep, selected)
            batch = submit(sweep, selected, resources, grid.code if grid else None, say)
    return run_here(sweep, selected, batch, say)
