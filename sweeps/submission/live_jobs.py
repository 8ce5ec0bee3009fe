"""Live jobs: what new runs wait for, how many run at once, and how they are cancelled."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from experiments.runtime.console import show
from experiments.runtime.locks import locked
from routing.errors import require
from sweeps import SweepError
from sweeps.jobs import pool, slurm
from sweeps.status.run_status import RunStatus
from sweeps.status.status import launch_of, require_queue, statuses
from sweeps.store.folder import JobBatch, Sweep
from sweeps.store.planned_run import PlannedRun, RunRecord


@dataclass
class LiveJobs:
    """Jobs that runs of a launch may wait for.

    Attributes:
        ids: Job ids by run.
        shared: Runs whose task other runs share: how it ends says nothing about one of them.
    """

    ids: dict[str, str] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)

    def condition(self, run: PlannedRun) -> str:
        """Return sbatch's `--dependency` of a run; "" if it waits for none of these jobs.

        `afterok` of its parent's task, so that Slurm removes it where that fails; `afterany` where
        tasks are shared, which then look themselves whose parent is done.
        """
        conditions = []
        if run.parent in self.ids:
            kind = "afterany" if self.shared & {run.name, run.parent} else "afterok"
            conditions.append(f"{kind}:{self.ids[run.parent]}")
        arrays: dict[str, None] = {}
        for name in run.after:
            if name in self.ids:
                arrays[self.ids[name].partition("_")[0]] = None
        if arrays:
            conditions.append("afterany:" + ":".join(arrays))
        return ",".join(conditions)


def find_live_jobs(sweep: Sweep, runs: Sequence[PlannedRun], kind: str) -> LiveJobs:
    """Return jobs of earlier launches that some runs wait for.

    Raises:
        SweepError: One of them runs elsewhere, where this launch cannot wait for it.
    """
    names = {run.name for run in runs}
    needed: set[str] = set()
    for run in runs:
        needed.update(set(run.needs) - names)
    live = LiveJobs()
    if not needed:
        return live
    stored = sweep.runs()
    rows, _ = statuses(sweep, [stored[name] for name in sorted(needed) if name in stored])
    for row in rows:
        if not row.live:
            continue
        holder = Sweep(sweep.root, row.sweep) if row.sweep else sweep
        batch = holder.latest_batches()[row.run.name]
        require(
            batch.kind == kind and kind != "debug",
            f"{row.run.name} is live on cluster={batch.cluster}: launch the runs that start from "
            "it there, or wait until it is done",
            SweepError,
        )
        live.ids[row.run.name] = row.job
        if batch.runs_per_task > 1:
            live.shared.add(row.run.name)
    return live


def live_launches(sweep: Sweep) -> set[str]:
    """Return the names of the launches of a sweep whose jobs are queued or running.

    Raises:
        SweepError: Slurm does not answer.
    """
    names: set[str] = set()
    clusters: set[str] = set()
    for batch in sweep.batches():
        if batch.kind == "slurm":
            clusters.add(batch.slurm_cluster)
        elif batch.kind == "local" and pool.is_alive(sweep, batch.name):
            names.add(batch.launch)
    for cluster in clusters:
        names.update(launch_of(sweep, job) for job in slurm.queue(cluster).values() if job.live)
    return names


def set_throttles(
    sweep: Sweep, runs: Sequence[PlannedRun], throttle: int, say: Callable[[str], None]
) -> None:
    """Change the limit of the live arrays of some runs."""
    latest = sweep.latest_batches()
    arrays: dict[str, JobBatch] = {}
    for row in statuses(sweep, runs)[0]:
        batch = latest.get(row.run.name)
        if row.live and not row.sweep and batch is not None and "_" in row.job:
            arrays[row.job.partition("_")[0]] = batch
    for array_id, batch in arrays.items():
        if batch.resources.get("throttle") != throttle:
            tasks = max(1, throttle // batch.runs_per_task)
            slurm.set_throttle(array_id, tasks, batch.slurm_cluster)
            sweep.note_throttle(batch, throttle)
            say(f"job {array_id}: at most {throttle} at once from now on")


def cancel(sweep: Sweep, runs: Sequence[RunRecord], say: Callable[[str], None] = show) -> None:
    """Cancel live runs; what they have saved stays."""
    names = {run.name for run in runs}
    cancelled: list[RunStatus] = []
    with locked(sweep.locked_folder, wait_s=60.0):
        latest = sweep.latest_batches()
        rows, trouble = statuses(sweep)
        require_queue(trouble)
        for row in rows:
            name, batch = row.run.name, latest.get(row.run.name)
            if name not in names or not row.live:
                continue
            if row.sweep or batch is None:
                say(f"{name}: {row.why}: {Sweep(sweep.root, row.sweep).command('cancel')}")
            elif batch.kind == "debug":
                say(f"{name}: runs in another shell: press Ctrl-C there")
            else:
                sweep.note(name, "cancelled")
                cancelled.append(row)
        end_jobs(sweep, cancelled, rows, latest)
    count = len(cancelled)
    say(f"cancelled {count} of {len(runs)} runs" if count else "nothing is in the queue or running")


def end_jobs(
    sweep: Sweep, ended: Sequence[RunStatus], rows: Sequence[RunStatus],
    latest: Mapping[str, JobBatch],
) -> None:  # fmt: skip
    """End the jobs of some live rows; `rows` and `latest` are of all runs of the sweep."""
    names = {row.run.name for row in ended}
    # Runs may share a task of Slurm with others, which must continue.
    shared_with_others = {row.job for row in rows if row.live and row.run.name not in names}
    job_ids: dict[str, list[str]] = {}  # by cluster
    for row in ended:
        name, batch = row.run.name, latest[row.run.name]
        if batch.kind == "slurm" and row.job in shared_with_others:
            pool.cancel_in_task(sweep, batch, name)
        elif batch.kind == "slurm":
            job_ids.setdefault(batch.slurm_cluster, []).append(row.job)
        else:
            pool.cancel(sweep, batch.name, name)
    for cluster, ids in job_ids.items():
        slurm.call(["scancel", *slurm.on_cluster(cluster), *ids])


def end_replaced(
    sweep: Sweep, names: Collection[str], rows: Sequence[RunStatus],
    latest: Mapping[str, JobBatch], say: Callable[[str], None],
) -> None:  # fmt: skip
    """Cancel the old jobs (in `rows` and `latest`) of live tables that were resubmitted."""
    replaced = [row for row in rows if row.live and row.run.name in names]
    try:
        end_jobs(sweep, replaced, rows, latest)
    except SweepError as error:
        jobs = ", ".join(row.job for row in replaced)
        raise SweepError(f"{error}; the new jobs are submitted: cancel {jobs} by hand") from None
    for row in replaced:
        say(f"{row.run.name}: job {row.job} is replaced by one that waits for the retried runs")
