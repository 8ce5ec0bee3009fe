"""One submission: noted, then handed to Slurm or a pool; undone if it is refused."""

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from experiments.runtime.files import atomic_write
from sweeps import SweepError, pool, sbatch, slurm
from sweeps.folder import JobBatch, Sweep
from sweeps.planned_run import PlannedRun
from sweeps.resources import Resources
from sweeps.snapshot import snapshot

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
    say(sweep.command("status"))
    return batch
