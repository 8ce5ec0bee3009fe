"""One throttled array through submitit, and leave."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.runtime.command import environment_of_jobs
from sweeps.errors import SweepError
from sweeps.jobs import slurm
from sweeps.jobs.cluster_resources import Resources
from sweeps.jobs.job import Job
from sweeps.jobs.sweep_folder import Sweep
from sweeps.planning.plan import Run


def new_batch(sweep: str) -> str:
    """Return a name for a submission; as the job name it finds the jobs of one that was cut off."""
    return f"{sweep}.{uuid.uuid4().hex[:8]}"


def parameters(resources: Resources, batch: str, code: Path) -> dict[str, Any]:
    """Return submitit's Slurm parameters for a batch."""
    extra: dict[str, Any] = {"requeue": True, "chdir": str(code), **resources.extra}
    chosen: dict[str, Any] = {
        "job_name": batch,
        "time": resources.minutes,
        "nodes": resources.nodes,
        "ntasks_per_node": resources.tasks,
        "cpus_per_task": resources.cpus,
        "signal_delay_s": resources.signal_s,
        "array_parallelism": resources.throttle,
        "additional_parameters": extra,
        # A rank that dies takes the others with it: they would wait in a collective for ever.
        "srun_args": ["--kill-on-bad-exit=1"],
    }
    for key in ("partition", "account", "qos", "constraint", "exclude"):
        if getattr(resources, key) is not None:
            chosen[key] = getattr(resources, key)
    if resources.gpus:
        chosen["gpus_per_node"] = resources.gpus
    if resources.memory_gb is not None:
        chosen["mem"] = f"{round(resources.memory_gb * 1024)}M"
    return chosen


def script(sweep: Sweep, resources: Resources, runs: int, code: Path) -> str:
    """Return the sbatch script that `submit` would hand over (no Slurm needed).

    Raises:
        SweepError: The installed submitit renders scripts in another way.
    """
    import sys

    from submitit.slurm import slurm as renderer

    make = getattr(renderer, "_make_sbatch_string", None)
    if make is None:
        raise SweepError("this submitit cannot render a script; pip install 'submitit>=1.5,<1.6'")
    import shlex

    command = (
        f"{shlex.quote(sys.executable)} -u -m submitit.core._submit {shlex.quote(str(sweep.logs))}"
    )
    options = parameters(resources, f"{sweep.name}.BATCH", code)
    count = {"map_count": runs} if runs > 1 else {}
    return str(make(command=command, folder=sweep.logs, **count, **options))


def submit(
    sweep: Sweep, runs: Sequence[Run], resources: Resources, code: Path, batch: str, cwd: Path
) -> dict[str, str]:
    """Submit runs as one array (several in sequence beyond MaxArraySize); return ids by run.

    Raises:
        SweepError: sbatch refused; its reason is in the message.
    """
    import submitit

    try:
        executor = submitit.SlurmExecutor(folder=sweep.logs, max_num_timeout=10_000)
    except RuntimeError:
        raise SweepError(
            "srun is not on PATH: this is no Slurm login node; use cluster=local or cluster=debug"
        ) from None
    ids: dict[str, str] = {}
    limit, after = slurm.max_array(), ""
    for start in range(0, len(runs), limit):
        part = runs[start : start + limit]
        options = parameters(resources, batch, code)
        if after:
            # The throttle counts per array, so a second one starts when the first has ended.
            options["dependency"] = f"afterany:{after}"
        executor.update_parameters(**options)
        jobs = [job_of(sweep, run, code, batch, cwd, resources) for run in part]
        try:
            # submitit prints what sbatch says; it is in the exception too.
            with _environment(code), contextlib.redirect_stderr(io.StringIO()), executor.batch():
                handles = [executor.submit(job) for job in jobs]
        except (submitit.core.utils.FailedJobError, subprocess.CalledProcessError) as error:
            reason = " ".join(str(getattr(error, "stderr", None) or error).split())
            raise SweepError(f"sbatch refused: {reason[-400:]}") from None
        ids |= {run.name: handle.job_id for run, handle in zip(part, handles, strict=True)}
        after = handles[0].job_id.split("_")[0]
    return ids


def job_of(
    sweep: Sweep, run: Run, code: Path | None, batch: str, cwd: Path, resources: Resources
) -> Job:
    """Return what a job needs to know of a run."""
    snapshot = None if code is None else str(code)
    return Job(
        run.to_dict(), str(sweep.root), sweep.name, str(cwd), snapshot, batch,
        resources.kind, resources.signal_s,
    )  # fmt: skip


def python_path(code: Path) -> str:
    """Return PYTHONPATH with the snapshot as the first place that Python looks in."""
    before = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(code), *([before] if before else [])])


@contextlib.contextmanager
def _environment(code: Path) -> Iterator[None]:
    """Let sbatch pass the snapshot on, and nothing that was chosen for this process."""
    before = dict(os.environ)
    for name in before.keys() - environment_of_jobs().keys():
        del os.environ[name]
    os.environ["PYTHONPATH"] = python_path(code)
    try:
        yield
    finally:
        del os.environ["PYTHONPATH"]
        os.environ.update(before)
