"""Launch, retry and cancel: look, decide and submit under one lock, so nothing goes out twice."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from experiments.runtime.locks import locked
from routing.errors import UserError
from sweeps.errors import SweepError
from sweeps.jobs import code_snapshot, pool, slurm, submit
from sweeps.jobs.cluster_resources import Resources
from sweeps.jobs.job import REQUEUE, STOPPED, GivenUp, execute
from sweeps.jobs.job_process import RunFailed
from sweeps.jobs.sweep_folder import Batch, Sweep
from sweeps.planning.plan import Plan, Run
from sweeps.view import standing

Say = Callable[[str], None]


@dataclass
class Launched:
    """What a launch did."""

    submitted: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)  # in this process only
    stopped: bool = False
    note: str = ""


def launch(made: Plan, resources: Resources, say: Say = print) -> Launched:
    """Submit what is missing of a plan: not done, not live, not failed.

    Args:
        made: Checked runs.
        resources: Where and with what they run.
        say: Takes one line at a time.

    Raises:
        SweepError: The scheduler refuses; nothing is noted as submitted then.
    """
    sweep = Sweep(made.root, made.grid.name)
    with locked(sweep.locked_folder, wait_s=60.0):
        runs = missing(sweep, made.runs, say)
        sweep.add(made.grid.title, made.runs)
        if not runs:
            say("nothing to submit")
            return Launched()
        if resources.kind != "debug":
            return _send(sweep, runs, resources, say)
        batch = _batch(sweep, runs, resources, "")
    return _here(sweep, runs, batch, resources, say)


def missing(sweep: Sweep, runs: Sequence[Run], say: Say) -> list[Run]:
    """Return the runs that need a job, and say how many do not and why."""
    elsewhere = standing.live_anywhere(sweep.root)
    rows, trouble = standing.stand(sweep, runs)
    if trouble:
        raise SweepError(f"{trouble} (without the queue nobody knows which runs are live)")
    wanted, counted = set(), {"done": 0, "live": 0, "failed": 0}
    for row in rows:
        if row.state == "done":
            counted["done"] += 1
        elif row.live or row.run.name in elsewhere:
            counted["live"] += 1
        elif row.state == "failed":
            counted["failed"] += 1
        else:
            wanted.add(row.run.name)
    for what, count in counted.items():
        if count:
            hint = f": python -m sweeps retry {sweep.name}" if what == "failed" else ""
            where = "in the queue or running" if what == "live" else what
            say(f"{count} of {len(runs)} {where}{hint}")
    return [run for run in runs if run.name in wanted]


def retry(sweep: Sweep, runs: Sequence[Run], resources: Resources, say: Say = print) -> Launched:
    """Submit failed and stopped runs again; each goes on from its last checkpoint.

    Args:
        sweep: The sweep's folder.
        runs: Which of its runs may be retried.
        resources: Where and with what they run.
        say: Takes one line at a time.
    """
    with locked(sweep.locked_folder, wait_s=60.0):
        elsewhere = standing.live_anywhere(sweep.root)
        rows, _ = standing.stand(sweep, runs)
        names = {r.run.name for r in rows if r.state in ("failed", "stopped")} - set(elsewhere)
        chosen = [run for run in runs if run.name in names]
        if not chosen:
            say("nothing has failed or stopped")
            return Launched()
        for run in chosen:
            sweep.attempts(run.name).note("retry")
        if resources.kind != "debug":
            return _send(sweep, chosen, resources, say)
        batch = _batch(sweep, chosen, resources, "")
    return _here(sweep, chosen, batch, resources, say)


def cancel(sweep: Sweep, runs: Sequence[Run], say: Say = print) -> int:
    """Cancel live runs (what they have saved stays); return how many."""
    with locked(sweep.locked_folder, wait_s=60.0):
        rows, trouble = standing.stand(sweep, runs)
        if trouble:
            raise SweepError(trouble)
        latest = {run: batch for batch in sweep.batches() for run in batch.runs}
        ids: list[str] = []
        pools: dict[str, list[str]] = {}
        for row in rows:
            if not row.live:
                continue
            batch = latest[row.run.name]
            sweep.attempts(row.run.name).note("cancelled")
            if batch.kind == "slurm":
                ids.append(row.job)
            else:
                pools.setdefault(batch.name, []).append(row.run.name)
        if ids:
            slurm.cancel(ids)
        for name, names in pools.items():
            pool.cancel(sweep, name, names)
    count = len(ids) + sum(len(names) for names in pools.values())
    say(f"cancelled {count} of {len(runs)} runs" if count else "nothing is in the queue or running")
    return count


def _batch(sweep: Sweep, runs: Sequence[Run], resources: Resources, code: str) -> Batch:
    batch = Batch(
        submit.new_batch(sweep.name),
        resources.name,
        resources.kind,
        [r.name for r in runs],
        time.time(),
        code,
        dataclasses.asdict(resources),
    )
    sweep.intend(batch)
    return batch


def _send(sweep: Sweep, runs: Sequence[Run], resources: Resources, say: Say) -> Launched:
    """Hand runs to Slurm or to a pool."""
    code = code_snapshot.take(sweep.root / ".sweeps" / "code")
    batch = _batch(sweep, runs, resources, code.name)
    start = submit.submit if resources.kind == "slurm" else pool.start
    ids = start(sweep, runs, resources, code, batch.name, Path.cwd())
    sweep.submitted(batch.name, ids)
    where = (
        sorted({i.split("_")[0] for i in ids.values()}, key=int)
        if resources.kind == "slurm"
        else []
    )
    place = (
        f"job {', '.join(where)}"
        if where
        else f"{min(resources.workers, len(runs))} workers on this machine"
    )
    at_once = f", at most {resources.throttle} at once" if where and len(runs) > 1 else ""
    say(f"submitted {len(runs)} runs as {place}{at_once}; code {code.name}")
    say(f"python -m sweeps status {sweep.name}")
    return Launched([run.name for run in runs])


def _here(
    sweep: Sweep, runs: Sequence[Run], batch: Batch, resources: Resources, say: Say
) -> Launched:
    """Run one after the other in this process; a failure is shown and the next one starts."""
    found = Launched([run.name for run in runs])
    for number, run in enumerate(runs, 1):
        say(f"--- {number}/{len(runs)}  {run.name}  {run.label}")
        job = submit.job_of(sweep, run, None, batch.name, Path.cwd(), resources)
        try:
            execute(job)
        except SystemExit as exit_:
            if exit_.code in (REQUEUE, STOPPED):
                say("stopped; the same command goes on")
                found.stopped = True
                break
            raise
        except Exception as error:
            text = io.StringIO()
            traceback.print_exception(error, file=text)
            sweep.logs.mkdir(parents=True, exist_ok=True)
            (sweep.logs / f"{batch.name}_{run.name}.err").write_text(text.getvalue())
            # What a run says of itself is a sentence; the place in the code is in the log.
            own = isinstance(error, UserError | RunFailed | GivenUp)
            with contextlib.suppress(OSError):
                sys.stderr.write(f"error: {error}\n" if own else text.getvalue())
            found.failed.append(run.name)
    return found
