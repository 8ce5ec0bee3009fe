"""The script of an array: the options of sbatch, and the environment of the jobs."""

import contextlib
import math
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from routing.errors import require
from sweeps import NothingSubmitted
from sweeps.jobs.snapshot import job_environment
from sweeps.store.folder import Sweep
from sweeps.store.resource_options import SBATCH_OPTIONS, Resources, minutes

# Options of ours that a site's own options in `extra` replace: given twice, sbatch refuses
# them or adds them up.
_REPLACED_BY = {
    "gpus_per_node": {"gres", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task"},
    "mem": {"mem", "mem-per-cpu", "mem-per-gpu"},
    "cpus_per_task": {"cpus-per-gpu", "cpus-per-task"},
}
# Variables that override the script for sbatch: a job of another name would not be found again, one
# without our PYTHONPATH would not run the copy of the code, and with WAIT sbatch does not return.
_OVERRIDES_SCRIPT = {
    "SBATCH_ARRAY_INX", "SBATCH_CLUSTERS", "SBATCH_ERROR", "SBATCH_EXPORT", "SBATCH_INPUT",
    "SBATCH_JOB_NAME", "SBATCH_NO_REQUEUE", "SBATCH_OPEN_MODE", "SBATCH_OUTPUT", "SBATCH_REQUEUE",
    "SBATCH_SIGNAL", "SBATCH_TIMELIMIT", "SBATCH_WAIT",
}  # fmt: skip


def parameters(resources: Resources, name: str, launch: Path, run_count: int) -> dict[str, Any]:
    """Return submitit's parameters for an array of this name, whose launch has this folder.

    Each of the runs that share a task gets what it asks for. That the array works in the copy of
    the code says in the queue which sweep it belongs to.

    Raises:
        NothingSubmitted: Slurm would replace characters in the path of the logs.
    """
    require(
        not {"%", "\\"} & set(str(launch)),
        f"Slurm replaces % and \\ in {launch}; type another paths.runs=FOLDER",
        NothingSubmitted,
    )
    extra: dict[str, Any] = {"requeue": True, "chdir": str(launch / "code")}
    for option, value in resources.extra.items():
        if value is not None and value is not False:
            extra[option] = value
    sharing = min(resources.runs_per_gpu, run_count)
    memory, cpus = resources.memory_gb, resources.cpus * sharing
    options: dict[str, Any] = {
        "job_name": name,
        "time": minutes(resources.time),
        "nodes": resources.nodes,
        "ntasks_per_node": resources.tasks,
        "cpus_per_task": cpus,
        "signal_delay_s": resources.signal_s,
        "array_parallelism": max(1, resources.throttle // sharing),
        "additional_parameters": extra,
        # A rank that dies ends the others, which would wait in a collective forever.
        "srun_args": ["--kill-on-bad-exit=1", *resources.srun],
        "setup": resources.setup or None,
        "teardown": [_teardown(launch)],
        "gpus_per_node": resources.gpus if resources.gpu_count else None,
        "mem": None if memory is None else f"{round(memory * sharing * 1024)}M",
    }
    for option in SBATCH_OPTIONS:
        options[option] = getattr(resources, option)
    for option, replacements in _REPLACED_BY.items():
        if replacements & extra.keys():
            options[option] = None
    if options["cpus_per_task"] is not None:  # since 22.05 srun does not inherit it from the job
        options["srun_args"].append(f"--cpus-per-task={cpus}")
    options = {option: value for option, value in options.items() if value is not None}
    return {**options, "wckey": None}  # submitit's own is refused where a site keeps such keys


def _teardown(launch: Path) -> str:
    """Return the line that requeues a run in a container without scontrol, which leaves a file."""
    # The id of one task: the raw id of an array's last one would mean them all.
    task = "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
    file = f'{shlex.quote(str(launch))}/"$one".requeue'
    return f'code=$?; one={task}; rm {file} 2>/dev/null && scontrol requeue "$one"; exit $code'


def python_command(resources: Resources) -> str:
    """Return what starts Python in a job: this interpreter unless the resources name another."""
    return resources.python or shlex.quote(sys.executable)


def script(sweep: Sweep, resources: Resources, run_count: int) -> str:
    """Return the script that `submit` writes for so many runs, without Slurm."""
    from submitit.slurm.slurm import _make_sbatch_string

    launch = sweep.launches / "LAUNCH"
    folder = shlex.quote(str(launch))
    command = f"{python_command(resources)} -u -m submitit.core._submit {folder}"
    options = parameters(resources, f"{sweep.name}.BATCH", launch, run_count)
    task_count = math.ceil(run_count / resources.runs_per_gpu)
    if task_count > 1:
        options["map_count"] = task_count
    return _make_sbatch_string(command=command, folder=sweep.logs, **options)


@contextlib.contextmanager
def sbatch_environment(code: Path) -> Iterator[None]:
    """Let sbatch pass the copy of the code on, but nothing of this process or of its job."""
    environment = {}
    for name, value in job_environment(code).items():
        # In a shell on a node these describe its own job; submitit would take it for the new one.
        of_job = name.startswith(("SLURM_", "SLURMD_", "SUBMITIT_"))
        of_job = of_job and name not in ("SLURM_CONF", "SLURM_JWT")
        if not of_job and name not in _OVERRIDES_SCRIPT:
            environment[name] = value
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
