"""Launch, retry and cancel: look, decide and submit under one lock, so that nothing runs twice."""

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
from sweeps import SweepError, pool, sbatch, slurm
from sweeps.folder import JobBatch, Sweep
from sweeps.grid import ENTRIES, Grid
from sweeps.job import REQUEUE, STOPPED, Job
from sweeps.planned_run import PlannedRun
from sweeps.resources import Resources
from sweeps.snapshot import snapshot
from sweeps.status import statuses

Print = Callable[[str], None]
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
        with _undo_if_refused(sweep):
            sweep.add(grid.title, noted)
            if not runs:
                say("nothing to submit")
                return None
            batch = _submit(sweep, runs, resources, grid.code, say)
    return _run_here(sweep, runs, batch, say)


@contextlib.contextmanager
def _undo_if_refused(sweep: Sweep) -> Iterator[None]:
    """Remove what was noted of a submission that is refused; the caller holds the lock.

    Enter it after looking at the queue, which may note ids of an earlier submission.
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


def _require_queue(trouble: str) -> None:
    if trouble:
        raise SweepError(f"{trouble} (without the queue nobody knows which runs are live)")


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
        _require_queue(trouble)
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
    if foreign:
        raise SweepError(
            f"sweep {sweep.name} runs {', '.join(sorted(foreign))}, a command of a grid in Python; "
            f"type python -m sweeps retry PATH/{sweep.name}.py"
        )
    with locked(sweep.locked_folder, wait_s=60.0):
        rows, trouble = statuses(sweep, runs)
        _require_queue(trouble)
        due = {row.run.name for row in rows if row.state in ("failed", "stopped")}
        selected = [run for run in runs if run.name in due]
        if not selected:
            say("nothing has failed or stopped")
            return None
        with _undo_if_refused(sweep):
            batch = _submit(sweep, selected, resources, grid.code if grid else None, say)
    return _run_here(sweep, selected, batch, say)


def cancel(sweep: Sweep, runs: Sequence[PlannedRun], say: Print = print) -> int:
    """Cancel live runs (what they have saved stays); return how many."""
    count = 0
    job_ids: dict[str, list[str]] = {}  # by cluster
    with locked(sweep.locked_folder, wait_s=60.0):
        latest = sweep.latest_batches()
        rows, trouble = statuses(sweep, runs)
        _require_queue(trouble)
        for row in rows:
            name, batch = row.run.name, latest.get(row.run.name)
            if not row.live:
                continue
            if row.sweep or batch is None:
                say(f"{name}: {row.why}: python -m sweeps cancel {row.sweep}")
            elif batch.kind == "debug":
                say(f"{name}: runs in another shell: press Ctrl-C there")
            else:
                sweep.note(name, "cancelled")
                count += 1
                if batch.kind == "slurm":
                    job_ids.setdefault(batch.slurm_cluster, []).append(row.job)
                else:
                    pool.cancel(sweep, batch.name, name)
        for cluster, ids in job_ids.items():
            slurm.call(["scancel", *slurm.on_cluster(cluster), *ids])
    say(f"cancelled {count} of {len(runs)} runs" if count else "nothing is in the queue or running")
    return count


def _submit(
    sweep: Sweep, runs: Sequence[PlannedRun], resources: Resources, code: Path | None, say: Print
) -> JobBatch:
    """Note a submission, then submit its runs to Slurm or a pool; `debug` runs are only noted.

    A submission that is cut off is found in the queue by its jobs' name, which is the batch's.
    Hence more runs than one array may have are several batches; each array starts when the one
    before it has ended.
    """
    kind = resources.kind
    limit = slurm.max_array(resources.slurm_cluster) if kind == "slurm" else len(runs)
    sweep.logs.mkdir(parents=True, exist_ok=True)  # a pool without it would wait for it
    code_name = "" if kind == "debug" else snapshot(sweep.snapshots, grid_code=code).name
    array_ids: list[str] = []
    for start in range(0, len(runs), limit):
        part = runs[start : start + limit]
        batch = JobBatch(
            name=f"{sweep.name}.{uuid.uuid4().hex[:8]}",
            cluster=resources.name,
            kind=kind,
            runs=[run.name for run in part],
            time=time.time(),
            code=code_name,
            resources=asdict(resources),
            slurm_cluster=resources.slurm_cluster,
        )
        sweep.intend(batch)
        if kind == "debug":
            return batch
        if kind == "slurm":
            after = array_ids[-1] if array_ids else ""
            ids = sbatch.submit(sweep, part, resources, batch, after)
        else:
            ids = pool.start(sweep, part, resources, batch)
        sweep.submitted(batch.name, ids, slurm_cluster=batch.slurm_cluster)
        array_ids.append(ids[part[0].name].split("_")[0])
    destination = f"job {', '.join(array_ids)}, at most {resources.throttle} at once"
    if kind == "local":
        destination = f"a pool of {min(resources.workers, len(runs))} on this machine"
    plural = "s" if len(runs) > 1 else ""
    say(f"submitted {len(runs)} run{plural} as {destination}; code {code_name}")
    say(f"python -m sweeps status {sweep.name}")
    return batch


def _run_here(sweep: Sweep, runs: Sequence[PlannedRun], batch: JobBatch, say: Print) -> Runs:
    """Run a `debug` batch, one run after the other; return those that failed.

    Raises:
        SystemExit: A run was asked to stop.
    """
    failed: Runs = []
    if batch.kind != "debug":
        return failed
    for number, run in enumerate(runs, 1):
        say(f"--- {number}/{len(runs)}  {run.name}  {run.label}")
        try:
            Job.create(sweep, run, batch)()
        except SystemExit as exit_:
            if exit_.code in (REQUEUE, STOPPED):
                say("stopped; the same command goes on")
                raise SystemExit(1) from None
            raise
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            sweep.logs.mkdir(parents=True, exist_ok=True)
            (sweep.logs / f"{batch.name}_{run.name}.err").write_text(text)
            # A user's error is a sentence here; its traceback is in the log.
            with contextlib.suppress(OSError):
                sys.stderr.write(f"error: {error}\n" if isinstance(error, UserError) else text)
            failed.append(run)
    if failed:
        say(f"{len(failed)} of {len(runs)} failed")
    return failed
