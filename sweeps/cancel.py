"""Cancel: end live runs of a sweep; what they have saved stays."""

from collections.abc import Callable, Sequence

from experiments.runtime.locks import locked
from sweeps import pool, slurm
from sweeps.folder import Sweep
from sweeps.planned_run import PlannedRun
from sweeps.status import require_queue, statuses


def cancel(sweep: Sweep, runs: Sequence[PlannedRun], say: Callable[[str], None] = print) -> int:
    """Cancel live runs (what they have saved stays); return how many."""
    count = 0
    job_ids: dict[str, list[str]] = {}  # by cluster
    with locked(sweep.locked_folder, wait_s=60.0):
        latest = sweep.latest_batches()
        rows, trouble = statuses(sweep)
        require_queue(trouble)
        names = {run.name for run in runs}
        # Runs may share a task of Slurm with others, which go on.
        shared_with_others = {row.job for row in rows if row.live and row.run.name not in names}
        for row in rows:
            if row.run.name not in names:
                continue
            name, batch = row.run.name, latest.get(row.run.name)
            if not row.live:
                continue
            if row.sweep or batch is None:
                say(f"{name}: {row.why}: {Sweep(sweep.root, row.sweep).command('cancel')}")
            elif batch.kind == "debug":
                say(f"{name}: runs in another shell: press Ctrl-C there")
            else:
                sweep.note(name, "cancelled")
                count += 1
                if batch.kind == "slurm" and row.job in shared_with_others:
                    pool.cancel_in_task(sweep, batch, name)
                elif batch.kind == "slurm":
                    job_ids.setdefault(batch.slurm_cluster, []).append(row.job)
                else:
                    pool.cancel(sweep, batch.name, name)
        for cluster, ids in job_ids.items():
            slurm.call(["scancel", *slurm.on_cluster(cluster), *ids])
    say(f"cancelled {count} of {len(runs)} runs" if count else "nothing is in the queue or running")
    return count
