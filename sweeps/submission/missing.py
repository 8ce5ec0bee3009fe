"""Which runs of a plan need a job: what is missing; with a retry, also what has failed."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from routing.errors import require
from sweeps import SweepError
from sweeps.status.run_status import RunStatus
from sweeps.status.status import require_queue, statuses
from sweeps.store.folder import Sweep
from sweeps.store.planned_run import PlannedRun

Runs = list[PlannedRun]
Print = Callable[[str], None]
BLOCKED = "waiting for a run that has not finished; add --retry to submit both"
FAILED = "failed; add --retry to submit them again"
DIVERGED = "not started, since the run that it starts from has diverged"
LIVE = "in the queue or running"


def find_missing(
    sweep: Sweep, runs: Sequence[PlannedRun], say: Print, need_queue: bool = True,
    retry: bool = False,
) -> tuple[Runs, Runs]:  # fmt: skip
    """Return the runs that need a job, and those to note; print how many need none and why.

    With `retry` also those that failed, and what has to be made again from them: a table in the
    queue would be made without them. Without `need_queue` runs whose jobs Slurm does not answer for
    count as live; with it that is a `SweepError`.
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
        reasons[run.name] = _reason(sweep, run, states, reasons, retry)
        steps = stored[run.name].steps if run.name in stored else None
        if _is_live(reasons[run.name]) and steps is not None and steps < (run.steps or 0):
            text = f" with {steps} steps; to extend them, launch again when they are done"
            reasons[run.name] += text
    for reason, count in Counter(filter(None, reasons.values())).items():
        say(f"{count} of {len(runs)} {reason}")
    # A live run keeps what is noted of it: that is what was submitted.
    noted = [run for run in runs if not _is_live(reasons[run.name]) or run.name not in stored]
    return [run for run in runs if not reasons[run.name]], noted


def _is_live(reason: str) -> bool:
    return reason.startswith(LIVE)


def _reason(
    sweep: Sweep, run: PlannedRun, rows: Mapping[str, RunStatus], reasons: Mapping[str, str],
    retry: bool,
) -> str:  # fmt: skip
    """Return why a run needs no job, "" if it needs one; `reasons` are those of earlier runs."""
    row = rows[run.name]
    if row.sweep:
        return f"{row.why}: {Sweep(sweep.root, row.sweep).command('status')}"
    if row.live:
        # Its job is replaced; a run of another shell has none.
        is_due = retry and row.job and any(reasons.get(name) == "" for name in run.needs)
        return "" if is_due else LIVE
    if row.state == "failed" and not retry:
        return FAILED
    # What it reads is recomputed or trained further.
    others = [reasons[name] for name in run.needs if name in reasons]
    renewed = any(not reason or _is_live(reason) for reason in others)
    if row.state == "done" and not renewed:
        return "done (extended: trained for more steps than asked)" if row.extended else "done"
    # A row may be missing: the job itself checks a parent outside of the plan.
    parent = rows.get(run.parent)
    if parent is None or parent.live or not reasons[run.parent]:
        return ""
    if parent.diverged:
        return DIVERGED
    return "" if parent.state == "done" else BLOCKED


def check_launched(sweep: Sweep, runs: Sequence[PlannedRun]) -> None:
    """Refuse to retry runs that were not launched, or that would train for other steps.

    The grid may have changed since, or its overrides may not have been typed again.

    Raises:
        SweepError: The message names the runs and the last launch.
    """
    stored = sweep.runs()
    require(
        stored,
        f"--retry: grid {sweep.name} was not launched below {sweep.root}; leave --retry out",
        SweepError,
    )
    differing = []
    for run in runs:
        label = run.label or run.name
        if run.name not in stored:
            differing.append(f"{run.name} ({label}), which was not launched")
        elif run.steps != stored[run.name].steps:
            steps = stored[run.name].steps
            differing.append(f"{run.name} ({label}), {run.steps} steps instead of {steps}")
    if not differing:
        return
    more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
    last = "".join(f"; it was {line}" for line in sweep.retry_lines(stored)[:1])
    raise SweepError(
        f"--retry: grid {sweep.name} now plans {', '.join(differing[:3])}{more}: type the "
        f"overrides of the launch{last}, or leave --retry out to submit other runs"
    )
