"""One submission: noted, then handed to Slurm or a pool; undone if it is refused."""

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from experiments.runtime.files import atomic_write
from routing.errors import UserError
from sweeps import SweepError, pool, require, sbatch, slurm
from sweeps.dependencies import levels, slurm_dependency, with_stored_names
from sweeps.folder import JobBatch, Sweep
from sweeps.planned_run import PlannedRun
from sweeps.pool_gpus import share_gpus
from sweeps.resources import Resources
from sweeps.snapshot import snapshot
from sweeps.status import statuses

Print = Callable[[str], None]


@contextlib.contextmanager
def undo_if_refused(sweep: Sweep) -> Iterator[None]:
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


def submit(
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
    live_jobs = _live_jobs(sweep, runs, kind)
    job_ids = dict(live_jobs)
    array_ids: list[str] = []
    # A pool orders its runs itself; on Slurm each stage is an array that depends on earlier ones.
    for group in levels(runs) if kind == "slurm" else [list(runs)]:
        previous = ""
        for start in range(0, len(group), limit):
            part = group[start : start + limit]
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
                dependencies = {run.name: slurm_dependency(run, job_ids) for run in part}
                try:
                    ids = sbatch.submit(sweep, part, resources, batch, previous, dependencies)
                except SweepError as error:
                    if not array_ids:
                        raise
                    # The earlier arrays are in the queue and stay noted.
                    raise UserError(f"{error}; the same launch submits the rest") from None
            else:
                ids = pool.start(sweep, part, share_gpus(sweep, resources), batch, live_jobs)
            sweep.submitted(batch.name, ids, slurm_cluster=batch.slurm_cluster)
            job_ids |= ids
            previous = ids[part[0].name].split("_")[0]
            array_ids.append(previous)
    destination = f"job {', '.join(array_ids)}, at most {resources.throttle} at once"
    if kind == "local":
        destination = f"a pool of {min(resources.workers, len(runs))} on this machine"
    plural = "s" if len(runs) > 1 else ""
    say(f"submitted {len(runs)} run{plural} as {destination}; code {code_name}")
    say(sweep.command("status"))
    return batch


def _live_jobs(sweep: Sweep, runs: Sequence[PlannedRun], kind: str) -> dict[str, str]:
    """Return job ids of earlier launches that runs wait for, by run.

    Raises:
        SweepError: One of them runs elsewhere, where this launch cannot wait for it.
    """
    names = {run.name for run in runs}
    needed: set[str] = set()
    for run in runs:
        needed.update(set(run.needs) - names)
    if not needed:
        return {}
    stored = sweep.runs()
    rows, _ = statuses(sweep, [stored[name] for name in sorted(needed) if name in stored])
    ids = {}
    for row in rows:
        if not row.live:
            continue
        holder = Sweep(sweep.root, row.sweep) if row.sweep else sweep
        batch = holder.latest_batches()[row.run.name]
        require(
            batch.kind == kind and kind != "debug",
            f"{row.run.name} runs on cluster={batch.cluster}, and what starts from it has to be "
            "launched there, or when it is done",
        )
        ids[row.run.name] = row.job
    return ids


def set_throttles(sweep: Sweep, runs: Sequence[PlannedRun], throttle: int, say: Print) -> None:
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
