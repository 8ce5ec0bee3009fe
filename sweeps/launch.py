"""Launch and retry: look, decide and submit under one lock, so that nothing runs twice."""

from collections import Counter
from collections.abc import Mapping, Sequence

from experiments.runtime.files import locked
from sweeps import require, slurm
from sweeps.debug import run_here
from sweeps.dependencies import BLOCKED, select_startable, with_stored_names
from sweeps.folder import JobBatch, Sweep
from sweeps.grid import ENTRIES, Grid
from sweeps.planned_run import PlannedRun
from sweeps.resources import Resources
from sweeps.run_status import RunStatus
from sweeps.status import require_queue, statuses
from sweeps.submit import Print, submit, undo_if_refused

Runs = list[PlannedRun]
LIVE = "in the queue or running"


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
            _set_throttles(sweep, planned, throttle, say)
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


def _set_throttles(sweep: Sweep, runs: Sequence[PlannedRun], throttle: int, say: Print) -> None:
    """Change the limit of the live arrays of some runs."""
    latest = sweep.latest_batches()
    arrays: dict[str, JobBatch] = {}
    for row in statuses(sweep, with_stored_names(sweep, runs))[0]:
        batch = latest.get(row.run.name)
        if row.live and not row.sweep and batch is not None and "_" in row.job:
            arrays[row.job.partition("_")[0]] = batch
    for array_id, batch in arrays.items():
        if batch.resources.get("throttle") != throttle:
            slurm.set_throttle(array_id, throttle, batch.slurm_cluster)
            sweep.note_throttle(batch, throttle)
            say(f"job {array_id}: at most {throttle} at once from now on")


def find_missing(
    sweep: Sweep, runs: Sequence[PlannedRun], say: Print, need_queue: bool = True
) -> tuple[Runs, Runs]:
    """Return the runs that need a job, and those to note; print how many need none and why.

    Without `need_queue` runs whose jobs Slurm does not answer for count as live; with it that is a
    `SweepError`.
    """
    stored = sweep.runs()
    runs = with_stored_names(sweep, runs)
    rows, trouble = statuses(sweep, runs)
    if need_queue:
        require_queue(trouble)
    elif trouble:
        say(f"{trouble}; what was submitted earlier counts as {LIVE}")
    states = {row.run.name: row for row in rows}
    reasons: dict[str, str] = {}
    for run in runs:
        reasons[run.name] = _reason(sweep, run, states, reasons)
    for reason, count in Counter(filter(None, reasons.values())).items():
        say(f"{count} of {len(runs)} {reason}")
    # A live run, and a retry of it, keeps the overrides that it was submitted with.
    noted = [run for run in runs if reasons[run.name] != LIVE or run.name not in stored]
    return [run for run in runs if not reasons[run.name]], noted


def _reason(
    sweep: Sweep, run: PlannedRun, rows: Mapping[str, RunStatus], reasons: Mapping[str, str]
) -> str:
    """Return why a run needs no job, "" if it needs one; `reasons` are those of earlier runs."""
    row = rows[run.name]
    if row.sweep:
        return f"{row.why}: {Sweep(sweep.root, row.sweep).command('status')}"
    if row.live:
        return LIVE
    if row.state == "failed":
        return f"failed: {sweep.command('retry')}"
    # What it reads is made anew, or goes on.
    renewed = any(reasons.get(name) in ("", LIVE) for name in run.needs)
    if row.state == "done" and not renewed:
        return "done"
    # A row may be missing: a parent outside of the plan is looked at by the job.
    parent = rows.get(run.parent)
    can_start = parent is None or parent.live or parent.state == "done"
    is_blocked = not can_start and reasons[run.parent] != ""
    return f"{BLOCKED}: {sweep.command('retry')}" if is_blocked else ""


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
        rows, trouble = statuses(sweep)
        require_queue(trouble)
        states = {row.run.name: row.state for row in rows}
        names = {run.name for run in runs}
        due = {name for name in names if states[name] in ("failed", "stopped")}
        due |= {run.name for run in runs if due.intersection(run.after)}  # tables are made again
        selected, blocked = select_startable(runs, states, due)
        if blocked:
            say(f"{len(blocked)} of {len(due)} {BLOCKED}")
        if not selected:
            say("nothing has failed or stopped")
            return None
        with undo_if_refused(sweep):
            _forget_resolutions(sweep, selected)
            batch = submit(sweep, selected, resources, grid.code if grid else None, say)
    return run_here(sweep, selected, batch, say)
