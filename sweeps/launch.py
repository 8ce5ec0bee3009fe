"""Launch and retry: look, decide and submit under one lock, so that nothing runs twice."""

from collections import Counter
from collections.abc import Sequence

from experiments.runtime.locks import locked
from sweeps import require
from sweeps.debug import run_here
from sweeps.folder import Sweep
from sweeps.grid import ENTRIES, Grid
from sweeps.planned_run import PlannedRun
from sweeps.resources import Resources
from sweeps.status import require_queue, statuses
from sweeps.submit import Print, submit, undo_if_refused

Runs = list[PlannedRun]
LIVE = "in the queue or running"


def launch(
    sweep: Sweep, grid: Grid, planned: Sequence[PlannedRun], resources: Resources,
    say: Print = print,
) -> Runs | None:  # fmt: skip
    """Submit the planned runs that are neither done, live nor failed.

    Returns:
        Runs that failed in this process; None if there was nothing to submit.

    Raises:
        SweepError: The scheduler refuses; nothing is noted as submitted then.
    """
    with locked(sweep.locked_folder, wait_s=60.0):
        runs, noted = find_missing(sweep, planned, say)
        with undo_if_refused(sweep):
            sweep.add(grid.title, noted)
            if not runs:
                say("nothing to submit")
                return None
            batch = submit(sweep, runs, resources, grid.code, say)
    return run_here(sweep, runs, batch, say)


def find_missing(
    sweep: Sweep, runs: Sequence[PlannedRun], say: Print, need_queue: bool = True
) -> tuple[Runs, Runs]:
    """Return the runs that need a job, and those to note; print how many need none and why.

    Without `need_queue` runs whose jobs Slurm does not answer for count as live; with it that is a
    `SweepError`.
    """
    stored = sweep.runs()
    rows, trouble = statuses(sweep, runs)
    if need_queue:
        require_queue(trouble)
    elif trouble:
        say(f"{trouble}; what was submitted earlier counts as {LIVE}")
    reasons = {}
    for row in rows:
        if row.sweep:
            reasons[row.run.name] = f"{row.why}: python -m sweeps status {row.sweep}"
        elif row.live:
            reasons[row.run.name] = LIVE
        elif row.state == "done":
            reasons[row.run.name] = "done"
        elif row.state == "failed":
            reasons[row.run.name] = f"failed: python -m sweeps retry {sweep.name}"
    for reason, count in Counter(reasons.values()).items():
        say(f"{count} of {len(runs)} {reason}")
    # A live run, and a retry of it, keeps the overrides that it was submitted with.
    noted = [run for run in runs if reasons.get(run.name) != LIVE or run.name not in stored]
    return [run for run in runs if run.name not in reasons], noted


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
        rows, trouble = statuses(sweep, runs)
        require_queue(trouble)
        due = {row.run.name for row in rows if row.state in ("failed", "stopped")}
        selected = [run for run in runs if run.name in due]
        if not selected:
            say("nothing has failed or stopped")
            return None
        with undo_if_refused(sweep):
            batch = submit(sweep, selected, resources, grid.code if grid else None, say)
    return run_here(sweep, selected, batch, say)
