"""Retry: submit failed and stopped runs again, under the lock of all sweeps."""

from collections.abc import Mapping, Sequence

from experiments.runtime.locks import locked
from routing.errors import require
from sweeps import SweepError
from sweeps.debug import run_here
from sweeps.folder import Sweep
from sweeps.grid import ENTRIES, Grid
from sweeps.missing import Runs, find_failed
from sweeps.planned_run import PlannedRun
from sweeps.resource_options import Resources
from sweeps.submit import Print, submit


def retry(
    sweep: Sweep, runs: Sequence[PlannedRun], resources: Resources, say: Print = print,
    grid: Grid | None = None, resources_by_run: Mapping[str, Resources] | None = None,
) -> Runs | None:  # fmt: skip
    """Submit failed and stopped runs of a sweep again; each resumes from its last checkpoint.

    Args:
        sweep: The sweep.
        runs: Which of its runs.
        resources: Where to run them.
        say: Prints a line.
        grid: Its grid, if that is one in Python.
        resources_by_run: What each run gets there, by name; by default `resources`, with the keys
            that the grid changes.

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
        SweepError,
    )
    with locked(sweep.locked_folder, wait_s=60.0):
        selected = find_failed(sweep, runs, say)
        if not selected:
            say("nothing has failed or stopped")
            return None
        with sweep.undo_if_refused():
            code = grid.code if grid else None
            batch = submit(sweep, selected, resources, code, say, resources_by_run)
    return run_here(sweep, selected, batch, say)
