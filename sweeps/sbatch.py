"""Submission of one array to Slurm, through submitit."""

import contextlib
import functools
import io
import subprocess
from collections.abc import Mapping, Sequence

from routing.errors import UserError
from sweeps import SweepError, slurm
from sweeps.folder import JobBatch, Sweep
from sweeps.job import Job
from sweeps.planned_run import PlannedRun
from sweeps.resource_options import Resources
from sweeps.sbatch_script import job_environment, parameters, python_command
from sweeps.sharing import SharedJob


def submit(
    sweep: Sweep, runs: Sequence[PlannedRun], resources: Resources, batch: JobBatch,
    after: str = "", dependencies: Mapping[str, str] | None = None,
) -> dict[str, str]:  # fmt: skip
    """Submit runs as an array that starts after the job `after`; return job ids by run.

    With `runs_per_gpu` so many runs share a task. `dependencies` are what each run waits for, as in
    sbatch's `--dependency`. Tasks of one array get different ones while it is held. A job whose
    dependency has failed is removed by Slurm.

    The cluster that sbatch names in its answer is stored in the batch.

    Raises:
        SweepError: sbatch refused.
        UserError: Some of the jobs are, or may be, in the queue.
    """
    import submitit

    from sweeps.executor import Executor

    find_by_name = functools.partial(_find_by_name, slurm_cluster=batch.slurm_cluster)
    command = python_command(resources)
    executor = Executor(find_by_name, folder=sweep.logs, max_num_timeout=10_000, python=command)
    code = sweep.snapshots / batch.code
    sharing = max(len(names) for names in batch.tasks())
    options = parameters(resources, batch.name, code, sweep.logs, sharing)
    extra = options["additional_parameters"]
    shared = [str(extra.get("dependency") or ""), f"afterany:{after}" if after else ""]
    by_task = []
    for names in batch.tasks():
        conditions = [(dependencies or {}).get(name, "") for name in names]
        by_task.append(_join(list(dict.fromkeys(conditions))))
    differ = len(set(by_task)) > 1
    shared_text = _join([*shared, "" if differ else by_task[0]])
    if shared_text:
        extra["dependency"] = shared_text
    if any(by_task):
        extra["kill-on-invalid-dep"] = "yes"
    is_held = bool(extra.get("hold"))
    if differ:
        extra["hold"] = True
    executor.update_parameters(**options)
    jobs = _make_jobs(sweep, runs, batch)
    try:
        # submitit prints sbatch's messages, which are in the exception too.
        with job_environment(code), contextlib.redirect_stderr(io.StringIO()), executor.batch():
            handles = [executor.submit(job) for job in jobs]
    except (submitit.core.utils.FailedJobError, subprocess.CalledProcessError) as error:
        reason = " ".join(str(getattr(error, "stderr", None) or error).split())[-400:]
        raise _refusal(reason, len(runs), bool(after)) from None
    batch.slurm_cluster = executor.slurm_cluster or batch.slurm_cluster
    task_ids = [handle.job_id for handle in handles]
    ids = {}
    for names, task_id in zip(batch.tasks(), task_ids, strict=True):
        ids.update(dict.fromkeys(names, task_id))
    if differ:
        conditions = [_join([*shared, condition]) for condition in by_task]
        _set_dependencies(task_ids, conditions, batch.slurm_cluster, release=not is_held)
    return ids


def _find_by_name(name: str, slurm_cluster: str) -> str | None:
    """Return the id of a job in the queue by its name, None if there is none."""
    with contextlib.suppress(SweepError):
        for job in slurm.queue(slurm_cluster).values():
            if job.name == name:
                return job.id.partition("_")[0]
    return None


def _make_jobs(
    sweep: Sweep, runs: Sequence[PlannedRun], batch: JobBatch
) -> Sequence[Job | SharedJob]:
    """Return what each task of an array calls."""
    if batch.runs_per_task == 1:
        return [Job.create(sweep, run, batch) for run in runs]
    by_name = {run.name: run for run in runs}
    jobs = []
    for names in batch.tasks():
        jobs.append(SharedJob.create(sweep, [by_name[name] for name in names], batch))
    return jobs


def _join(conditions: Sequence[str]) -> str:
    return ",".join(filter(None, conditions))


def _set_dependencies(
    ids: Sequence[str], conditions: Sequence[str], slurm_cluster: str, release: bool
) -> None:
    """Give each task of a held array its dependency, then release it; if refused, cancel it."""
    cluster, array_id = slurm.on_cluster(slurm_cluster), ids[0].partition("_")[0]
    try:
        for job_id, condition in zip(ids, conditions, strict=True):
            if condition:
                change = ["update", f"JobId={job_id}", f"Dependency={condition}"]
                slurm.call(["scontrol", *cluster, *change])
        if release:
            slurm.call(["scontrol", *cluster, "release", array_id])
    except SweepError:
        slurm.call(["scancel", *cluster, array_id])
        raise


def _refusal(reason: str, count: int, is_later_array: bool) -> UserError:
    if "timed out" in reason:  # the controller may have the jobs: their name tells
        return UserError(f"sbatch had no answer ({reason}); status shows what came through")
    if is_later_array:
        return UserError(
            f"sbatch refused {count} of the runs: {reason}; the same launch submits them"
        )
    return SweepError(f"sbatch refused: {reason}")
