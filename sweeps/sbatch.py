"""Submission to Slurm: the options of a job's script, and the call of sbatch through submitit."""

import contextlib
import io
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.runtime.command import environment_of_jobs
from routing.errors import UserError
from sweeps import SweepError, require, slurm
from sweeps.folder import JobBatch, Sweep
from sweeps.job import Job
from sweeps.planned_run import PlannedRun
from sweeps.resources import SBATCH_OPTIONS, Resources, minutes
from sweeps.snapshot import python_path

# Options of ours that a site's own options in `extra` replace: asked for twice, sbatch refuses
# them or adds them up.
_REPLACED_BY = {
    "gpus_per_node": {"gres", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task"},
    "mem": {"mem", "mem-per-cpu", "mem-per-gpu"},
    "cpus_per_task": {"cpus-per-gpu", "cpus-per-task"},
}
# Variables that override the script for sbatch: a job of another name would not be found again, one
# without our PYTHONPATH would not run the snapshot, and with WAIT sbatch does not return.
_OVERRIDES_SCRIPT = {
    "SBATCH_ARRAY_INX", "SBATCH_CLUSTERS", "SBATCH_ERROR", "SBATCH_EXPORT", "SBATCH_INPUT",
    "SBATCH_JOB_NAME", "SBATCH_NO_REQUEUE", "SBATCH_OPEN_MODE", "SBATCH_OUTPUT", "SBATCH_REQUEUE",
    "SBATCH_SIGNAL", "SBATCH_TIMELIMIT", "SBATCH_WAIT",
}  # fmt: skip


def submit(
    sweep: Sweep, runs: Sequence[PlannedRun], resources: Resources, batch: JobBatch,
    after: str = "", dependencies: Mapping[str, str] | None = None,
) -> dict[str, str]:  # fmt: skip
    """Submit runs as an array that starts after the job `after`; return job ids by run.

    `dependencies` are what each run waits for, as in sbatch's `--dependency`. Tasks of one array
    get different ones while it is held. A job whose dependency has failed is removed by Slurm.

    The cluster that sbatch names in its answer is stored in the batch.

    Raises:
        SweepError: sbatch refused.
        UserError: Some of the jobs are, or may be, in the queue.
    """
    import submitit

    from sweeps.executor import Executor

    def find_by_name(name: str) -> str | None:
        with contextlib.suppress(SweepError):
            for job in slurm.queue(batch.slurm_cluster).values():
                if job.name == name:
                    return job.id.partition("_")[0]
        return None

    command = python_command(resources)
    executor = Executor(find_by_name, folder=sweep.logs, max_num_timeout=10_000, python=command)
    code = sweep.snapshots / batch.code
    options = parameters(resources, batch.name, code, sweep.logs)
    extra = options["additional_parameters"]
    shared = [str(extra.get("dependency") or ""), f"afterany:{after}" if after else ""]
    by_run = [(dependencies or {}).get(run.name, "") for run in runs]
    differ = len(set(by_run)) > 1
    shared_text = _join([*shared, "" if differ else by_run[0]])
    if shared_text:
        extra["dependency"] = shared_text
    if any(by_run):
        extra["kill-on-invalid-dep"] = "yes"
    is_held = bool(extra.get("hold"))
    if differ:
        extra["hold"] = True
    executor.update_parameters(**options)
    jobs = [Job.create(sweep, run, batch) for run in runs]
    try:
        # submitit prints sbatch's messages, which are in the exception too.
        with job_environment(code), contextlib.redirect_stderr(io.StringIO()), executor.batch():
            handles = [executor.submit(job) for job in jobs]
    except (submitit.core.utils.FailedJobError, subprocess.CalledProcessError) as error:
        reason = " ".join(str(getattr(error, "stderr", None) or error).split())[-400:]
        raise _refusal(reason, len(runs), bool(after)) from None
    batch.slurm_cluster = executor.slurm_cluster or batch.slurm_cluster
    ids = {run.name: handle.job_id for run, handle in zip(runs, handles, strict=True)}
    if differ:
        conditions = [_join([*shared, condition]) for condition in by_run]
        _set_dependencies(list(ids.values()), conditions, batch.slurm_cluster, release=not is_held)
    return ids


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


def parameters(resources: Resources, name: str, code: Path, logs: Path) -> dict[str, Any]:
    """Return submitit's parameters for a batch.

    Args:
        resources: What each run gets.
        name: Name of the jobs.
        code: The snapshot that they run.
        logs: Folder of their output.

    Raises:
        SweepError: Slurm would replace characters in the path of the logs.
    """
    require(
        not {"%", "\\"} & set(str(logs)),
        f"Slurm replaces % and \\ in {logs}; type another paths.runs=FOLDER",
    )
    extra: dict[str, Any] = {"requeue": True, "chdir": str(code)}
    for option, value in resources.extra.items():
        if value is not None and value is not False:
            extra[option] = value
    memory = resources.memory_gb
    options: dict[str, Any] = {
        "job_name": name,
        "time": minutes(resources.time),
        "nodes": resources.nodes,
        "ntasks_per_node": resources.tasks,
        "cpus_per_task": resources.cpus,
        "signal_delay_s": resources.signal_s,
        "array_parallelism": resources.throttle,
        "additional_parameters": extra,
        # A rank that dies ends the others, which would wait in a collective forever.
        "srun_args": ["--kill-on-bad-exit=1", *resources.srun],
        "setup": resources.setup or None,
        "teardown": [_teardown(logs)],
        "gpus_per_node": resources.gpus if resources.gpu_count else None,
        "mem": None if memory is None else f"{round(memory * 1024)}M",
    }
    for option in SBATCH_OPTIONS:
        options[option] = getattr(resources, option)
    for option, replacements in _REPLACED_BY.items():
        if replacements & extra.keys():
            options[option] = None
    if options["cpus_per_task"] is not None:  # since 22.05 srun does not inherit it from the job
        options["srun_args"].append(f"--cpus-per-task={resources.cpus}")
    options = {option: value for option, value in options.items() if value is not None}
    return {**options, "wckey": None}  # submitit's own is refused where a site keeps such keys


def _teardown(logs: Path) -> str:
    """Return the line that requeues a run in a container without scontrol, which leaves a file."""
    # The id of one task: the raw id of an array's last one would mean them all.
    task = "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
    file = f'{shlex.quote(str(logs))}/"$one".requeue'
    return f'code=$?; one={task}; rm {file} 2>/dev/null && scontrol requeue "$one"; exit $code'


def python_command(resources: Resources) -> str:
    """Return what starts Python in a job: this interpreter unless the resources name another."""
    return resources.python or shlex.quote(sys.executable)


def script(sweep: Sweep, resources: Resources, runs: int, code: Path) -> str:
    """Return the script that `submit` writes, without Slurm."""
    from submitit.slurm.slurm import _make_sbatch_string

    logs = shlex.quote(str(sweep.logs))
    command = f"{python_command(resources)} -u -m submitit.core._submit {logs}"
    options = parameters(resources, f"{sweep.name}.BATCH", code, sweep.logs)
    if runs > 1:
        options["map_count"] = runs
    return _make_sbatch_string(command=command, folder=sweep.logs, **options)


@contextlib.contextmanager
def job_environment(code: Path) -> Iterator[None]:
    """Let sbatch pass the snapshot on, but nothing that belongs to this process or its job."""
    before, inherited = dict(os.environ), environment_of_jobs()
    for name in before:
        # In a shell on a node these describe its own job; submitit would take it for the new one.
        of_job = name.startswith(("SLURM_", "SLURMD_", "SUBMITIT_"))
        of_job = of_job and name not in ("SLURM_CONF", "SLURM_JWT")
        if name not in inherited or of_job or name in _OVERRIDES_SCRIPT:
            del os.environ[name]
    os.environ["PYTHONPATH"] = python_path(code)
    try:
        yield
    finally:
        del os.environ["PYTHONPATH"]
        os.environ.update(before)
