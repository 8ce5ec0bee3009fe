"""Launch, retry and cancel: look, decide and submit under one lock, so nothing goes out twice."""

import contextlib
import os
import sys
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from experiments.runtime.files import atomic_write, locked
from routing.errors import UserError
from sweeps import SweepError, run_status
from sweeps.jobs import pool, slurm
from sweeps.jobs.cluster_resources import Resources
from sweeps.jobs.job import REQUEUE, STOPPED, Job
from sweeps.jobs.sweep_folder import JobBatch, Sweep, snapshot
from sweeps.planning.grid import ENTRIES, Grid
from sweeps.planning.planned_runs import Plan, PlannedRun

Say = Callable[[str], None]
Runs = list[PlannedRun]
LIVE = "in the queue or running"


def launch(made: Plan, resources: Resources, say: Say = print) -> Runs | None:
    """Submit what is missing of a plan (not done, not live, not failed); `say` takes lines.

    Return the runs that failed in this process, None if nothing was missing. `SweepError` if the
    scheduler refuses; nothing is noted as submitted then.
    """
    sweep = Sweep(made.root, made.grid.name)
    with locked(sweep.locked_folder, wait_s=60.0):
        runs, noted = missing(sweep, made.runs, say)
        with _taken_back(sweep):
            sweep.add(made.grid.title, noted)
            if not runs:
                say("nothing to submit")
                return None
            batch = _submit(sweep, runs, resources, made.grid.code, say)
    return _run_here(sweep, runs, batch, say)


@contextlib.contextmanager
def _taken_back(sweep: Sweep) -> Iterator[None]:
    """Leave nothing noted of a submission that is refused; the caller holds the lock.

    It is entered after the look at the queue, which may have noted ids of an earlier one.
    """
    runs, batches = sweep.path / "sweep.json", sweep.path / "batches.jsonl"
    content = runs.read_bytes() if runs.is_file() else None
    size = batches.stat().st_size if batches.is_file() else None
    try:
        yield
    except SweepError:
        if content is None:
            runs.unlink(missing_ok=True)
        else:
            atomic_write(runs, content)
        if size is None:
            batches.unlink(missing_ok=True)
        elif batches.is_file():
            os.truncate(batches, size)  # only appended to; a new file would lose its mode
        raise


def _known(sweep: Sweep, runs: Sequence[PlannedRun]) -> list[run_status.RunStatus]:
    rows, trouble = run_status.statuses(sweep, runs)
    if trouble:
        raise _no_queue(trouble)
    return rows


def _no_queue(trouble: str) -> SweepError:
    return SweepError(f"{trouble} (without the queue nobody knows which runs are live)")


def missing(
    sweep: Sweep, runs: Sequence[PlannedRun], say: Say, need_queue: bool = True
) -> tuple[Runs, Runs]:
    """Return the runs that need a job, and those to note; say how many need none and why.

    Without `need_queue` runs whose jobs Slurm does not answer for count as live; with it that is a
    `SweepError`.
    """
    known, why = sweep.runs(), {}
    rows, trouble = run_status.statuses(sweep, runs)
    if trouble and need_queue:
        raise _no_queue(trouble)
    if trouble:
        say(f"{trouble}; what was submitted earlier counts as {LIVE}")
    for row in rows:
        if row.sweep:
            why[row.run.name] = f"{row.why}: python -m sweeps status {row.sweep}"
        elif row.live:
            why[row.run.name] = LIVE
        elif row.state in ("done", "failed"):
            retry = f": python -m sweeps retry {sweep.name}"
            why[row.run.name] = row.state + (retry if row.state == "failed" else "")
    for text, count in Counter(why.values()).items():
        say(f"{count} of {len(runs)} {text}")
    # A live run, and a retry of it, keeps the words that it was submitted with.
    noted = [run for run in runs if why.get(run.name) != LIVE or run.name not in known]
    return [run for run in runs if run.name not in why], noted


def retry(
    sweep: Sweep, runs: Sequence[PlannedRun], resources: Resources, say: Say = print,
    found: Grid | None = None,
) -> Runs | None:  # fmt: skip
    """Submit failed and stopped runs of a sweep again; each goes on from its last checkpoint.

    It returns what `launch` does. `found` is its grid, if that is one in Python; `SweepError` for
    code that neither it nor this suite has, as the sweep's file may name.
    """
    known = {*ENTRIES.values(), *(found.commands.values() if found else ())}
    if others := {run.entry for run in runs} - known:
        raise SweepError(
            f"sweep {sweep.name} runs {', '.join(sorted(others))}, a command of a grid in Python; "
            f"type python -m sweeps retry PATH/{sweep.name}.py"
        )
    with locked(sweep.locked_folder, wait_s=60.0):
        due = {r.run.name for r in _known(sweep, runs) if r.state in ("failed", "stopped")}
        chosen = [run for run in runs if run.name in due]
        if not chosen:
            say("nothing has failed or stopped")
            return None
        with _taken_back(sweep):
            batch = _submit(sweep, chosen, resources, found.code if found else None, say)
    return _run_here(sweep, chosen, batch, say)


def cancel(sweep: Sweep, runs: Sequence[PlannedRun], say: Say = print) -> int:
    """Cancel live runs (what they have saved stays); return how many."""
    count = 0
    ids: dict[str, list[str]] = {}  # by cluster
    with locked(sweep.locked_folder, wait_s=60.0):
        latest = sweep.latest_batches()
        for row in [row for row in _known(sweep, runs) if row.live]:
            name, batch = row.run.name, latest.get(row.run.name)
            if row.sweep or batch is None:
                say(f"{name}: {row.why}: python -m sweeps cancel {row.sweep}")
            elif batch.kind == "debug":
                say(f"{name}: runs in another shell: press Ctrl-C there")
            else:
                sweep.note(name, "cancelled")
                count += 1
                if batch.kind == "slurm":
                    ids.setdefault(batch.slurm_cluster, []).append(row.job)
                else:
                    pool.cancel(sweep, batch.name, name)
        for cluster, jobs in ids.items():
            slurm.call(["scancel", *slurm.on_cluster(cluster), *jobs])
    say(f"cancelled {count} of {len(runs)} runs" if count else "nothing is in the queue or running")
    return count


def _submit(
    sweep: Sweep, runs: Sequence[PlannedRun], resources: Resources, code: Path | None, say: Say
) -> JobBatch:
    """Note a submission, then hand its runs to Slurm or a pool, unless they run in this process.

    The name of what is noted, also the jobs', finds a submission that is cut off; hence more runs
    than an array may have are several, each of which starts when the one before it has ended.
    """
    kind, after, jobs = resources.kind, "", []
    cluster = resources.slurm_cluster
    limit = slurm.max_array(cluster) if kind == "slurm" else len(runs)
    sweep.logs.mkdir(parents=True, exist_ok=True)  # a pool could only wait for a folder to log to
    copied = "" if kind == "debug" else snapshot(sweep.snapshots, own=code).name
    for start in range(0, len(runs), limit):
        part = runs[start : start + limit]
        batch = JobBatch(
            f"{sweep.name}.{uuid.uuid4().hex[:8]}", resources.name, kind,
            [run.name for run in part], time.time(), copied, asdict(resources),
            slurm_cluster=cluster,
        )  # fmt: skip
        sweep.intend(batch)
        if kind == "debug":
            return batch
        if kind == "slurm":
            ids = slurm.submit(sweep, part, resources, batch, after)
        else:
            ids = pool.start(sweep, part, resources, batch)
        sweep.submitted(batch.name, ids, slurm_cluster=batch.slurm_cluster)
        after = ids[part[0].name].split("_")[0]
        jobs.append(after)
    place = f"job {', '.join(jobs)}, at most {resources.throttle} at once"
    if kind == "local":
        place = f"a pool of {min(resources.workers, len(runs))} on this machine"
    say(f"submitted {len(runs)} run{'s' * (len(runs) > 1)} as {place}; code {copied}")
    say(f"python -m sweeps status {sweep.name}")
    return batch


def _run_here(sweep: Sweep, runs: Sequence[PlannedRun], batch: JobBatch, say: Say) -> Runs:
    """Run what is debugged one after the other; return those that failed, which are shown.

    `SystemExit` if one was asked to stop.
    """
    failed = []
    for number, run in enumerate(runs if batch.kind == "debug" else (), 1):
        say(f"--- {number}/{len(runs)}  {run.name}  {run.label}")
        try:
            Job.of(sweep, run, batch)()
        except SystemExit as exit_:
            if exit_.code in (REQUEUE, STOPPED):
                say("stopped; the same command goes on")
                raise SystemExit(1) from None
            raise
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            sweep.logs.mkdir(parents=True, exist_ok=True)
            (sweep.logs / f"{batch.name}_{run.name}.err").write_text(text)
            # What a run says of itself is a sentence; the place in the code is in the log.
            with contextlib.suppress(OSError):
                sys.stderr.write(f"error: {error}\n" if isinstance(error, UserError) else text)
            failed.append(run)
    if failed:
        say(f"{len(failed)} of {len(runs)} failed")
    return failed
