"""Which runs of a sweep need a job: for a launch, and for a retry."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from routing.errors import require
from sweeps import SweepError
from sweeps.plan.grid import ENTRIES
from sweeps.status.run_status import RunStatus
from sweeps.status.status import require_queue, statuses
from sweeps.store.folder import Sweep
from sweeps.store.planned_run import PlannedRun

Runs = list[PlannedRun]
Print = Callable[[str], None]
BLOCKED = "waiting for a run that has not finished"
LIVE = "in the queue or running"
DUE_STATES = ("failed", "stopped")


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
    # What it reads is recomputed or trained further.
    renewed = any(reasons.get(name) in ("", LIVE) for name in run.needs)
    if row.state == "done" and not renewed:
        return "done (extended: trained for more steps than asked)" if row.extended else "done"
    # A row may be missing: the job itself checks a parent outside of the plan.
    parent = rows.get(run.parent)
    can_start = parent is None or parent.live or parent.state == "done"
    is_blocked = not can_start and reasons[run.parent] != ""
    return f"{BLOCKED}: {sweep.command('retry')}" if is_blocked else ""


def find_due(runs: Sequence[PlannedRun], rows: Mapping[str, RunStatus]) -> Runs:
    """Return the failed and stopped runs among `runs`, then the tables that read their results.

    Also tables that are queued or running: their jobs would make them without these runs.
    """
    due = [run for run in runs if rows[run.name].state in DUE_STATES]
    names = {run.name for run in due}
    tables: dict[str, PlannedRun] = {}
    for run in runs:  # later stages follow those that they read
        reads_them = names.intersection(run.after) or tables.keys() & set(run.needs)
        row = rows[run.name]
        is_elsewhere = row.live and (row.sweep or not row.job)  # of another sweep or shell
        if reads_them and run.name not in names and not is_elsewhere:
            tables[run.name] = run
    return due + list(tables.values())


def find_failed(runs: Sequence[PlannedRun], rows: Sequence[RunStatus], say: Print) -> Runs:
    """Return the runs that are due for a retry and whose parent is done, live or due as well.

    `rows` has the status of all runs of the sweep.
    """
    by_name = {row.run.name: row for row in rows}
    due = find_due(runs, by_name)
    selected: Runs = []
    names = {""}  # the parent of a run without one
    for run in due:
        parent = by_name.get(run.parent)
        if run.parent in names or (parent and (parent.live or parent.state == "done")):
            selected.append(run)
            names.add(run.name)
    if len(selected) < len(due):
        say(f"{len(due) - len(selected)} of {len(due)} {BLOCKED}")
    return selected


def check_entries(sweep: Sweep, runs: Sequence[PlannedRun]) -> None:
    """Refuse an entry point, from the sweep's file, that is not one of this suite."""
    foreign = {run.entry for run in runs} - set(ENTRIES.values())
    require(
        not foreign,
        f"sweep {sweep.name} runs {', '.join(sorted(foreign))}, which is no command of this suite",
        SweepError,
    )
