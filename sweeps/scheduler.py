"""The jobs of runs: from Slurm (two calls per cluster), and from the pools on this machine."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from sweeps import SweepError, pool, slurm
from sweeps.folder import JobBatch, Sweep
from sweeps.run_status import WAITS_FOR_WORKER

Jobs = dict[str, slurm.QueueJob]
Queue = Callable[[str], tuple[Jobs, str]]


def slurm_queue(slurm_cluster: str) -> tuple[Jobs, str]:
    """Return a cluster's queued jobs by id, and why they are unknown ("" if they are known)."""
    try:
        return slurm.queue(slurm_cluster), ""
    except SweepError as error:
        return {}, str(error)


def find_jobs(
    sweep: Sweep, latest: Mapping[str, JobBatch], queue: Queue, history: bool = True
) -> tuple[Jobs, str]:
    """Return the jobs of runs by run, from Slurm (two calls per cluster) and the pools."""
    jobs: Jobs = {}
    trouble = ""
    pools: dict[str, dict[str, str]] = {}
    by_cluster: dict[str, dict[str, JobBatch]] = {}
    for run, batch in latest.items():
        if batch.kind == "slurm":
            by_cluster.setdefault(batch.slurm_cluster, {})[run] = batch
            continue
        state = ""
        if batch.kind == "local":
            if batch.name not in pools:
                pools[batch.name] = pool.states(sweep, batch.name)
            state = pools[batch.name].get(run, "")
        jobs[run] = slurm.QueueJob(batch.ids.get(run, ""), state, WAITS_FOR_WORKER)
    for cluster, batches in sorted(by_cluster.items()):
        cluster_jobs, cluster_trouble = _find_slurm_jobs(sweep, cluster, batches, queue, history)
        jobs |= cluster_jobs
        trouble = trouble or cluster_trouble
    return jobs, trouble


def _find_slurm_jobs(
    sweep: Sweep, cluster: str, latest: Mapping[str, JobBatch], queue: Queue, history: bool
) -> tuple[Jobs, str]:
    """Return the jobs of runs whose latest batches are on one cluster of Slurm, by run."""
    queued, trouble = queue(cluster)
    adopt(sweep, {batch.name: batch for batch in latest.values()}.values(), queued)
    ids = {run: batch.ids.get(run, "") for run, batch in latest.items()}
    gone = [job_id for job_id in ids.values() if job_id not in queued]
    ended = slurm.history(gone, cluster) if history and any(gone) and not trouble else {}
    jobs = {}
    for run, batch in latest.items():
        job = queued.get(ids[run])
        # After a cluster was set up anew another job may have the same id: its name differs.
        if job is None or job.name != batch.name:
            job = ended.get(ids[run], slurm.QueueJob(ids[run], ""))
        if (
            job.live
            and batch.runs_per_task > 1
            and pool.has_left_task(sweep, batch, run, job.running)
        ):
            job = replace(job, state="ENDED")
        jobs[run] = job
    return jobs, trouble


def adopt(sweep: Sweep, batches: Iterable[JobBatch], queued: Jobs) -> None:
    """Give a batch whose submission was cut off the ids of the jobs with its name."""
    for batch in batches:
        if batch.kind != "slurm" or batch.ids:
            continue
        # Tasks of an array are numbered in the order of the batch's runs; some may have ended.
        ids: dict[str, str] = {}
        for job_id, job in queued.items():
            if job.name == batch.name:
                index = int(job_id.partition("_")[2] or 0)
                for names in batch.tasks()[index : index + 1]:
                    ids |= dict.fromkeys(names, job_id)
        if ids:
            batch.ids.update(ids)
            sweep.submitted(batch.name, ids, "found in the queue")
