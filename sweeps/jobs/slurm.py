"""Slurm: what it knows about jobs (one squeue, one sacct call), and submission through submitit."""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.runtime.command import environment_of_jobs
from routing.errors import UserError
from sweeps import SweepError
from sweeps.jobs.cluster_resources import OPTIONS, Resources, minutes
from sweeps.jobs.job import Job
from sweeps.jobs.sweep_folder import JobBatch, Sweep, python_path
from sweeps.planning.planned_runs import PlannedRun

RUNNING = {"RUNNING", "COMPLETING", "CONFIGURING", "SIGNALING", "STAGE_OUT", "SUSPENDED"}
LIVE = RUNNING | {
    "PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESIZING", "STOPPED", "SPECIAL_EXIT",
}  # fmt: skip


@dataclass(frozen=True)
class QueueJob:
    """One job or array task as Slurm reports it."""

    id: str
    state: str
    reason: str = ""
    node: str = ""
    name: str = ""
    exit: str = ""

    @property
    def live(self) -> bool:
        """Whether it is in the queue or running."""
        return self.state in LIVE

    @property
    def running(self) -> bool:
        """Whether it holds a node."""
        return self.state in RUNNING


def call(words: Sequence[str]) -> str:
    """Return what a Slurm command (words, never a shell) printed; `SweepError` if it fails."""
    # The words alone decide which jobs are listed: `SLURM_CLUSTERS` asks another cluster, and
    # `SQUEUE_PARTITION` and the like hide jobs, which would then be submitted again.
    hidden = ("SQUEUE_", "SACCT_", "SCANCEL_", "SLURM_CLUSTERS")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=60, check=True, env=environment
        )
    except (OSError, subprocess.SubprocessError) as error:
        reason = " ".join(str(getattr(error, "stderr", None) or error).split())
        advice = "where no Slurm cluster answers use cluster=local or cluster=debug"
        raise SweepError(f"{words[0]}: {reason}; {advice}") from None
    return done.stdout


def on_cluster(slurm_cluster: str) -> list[str]:
    """Return the words that send a Slurm command to a cluster; none for the default one."""
    return ["-M", slurm_cluster] if slurm_cluster else []


def queue(slurm_cluster: str = "") -> dict[str, QueueJob]:
    """Return the caller's jobs by id, array tasks one by one, those that just ended included.

    Job ids are unique within a cluster only, so each cluster is asked by itself.
    """
    columns = "%i|%T|%r|%N|%j"
    words = ["squeue", *on_cluster(slurm_cluster), "--me", "-r", "-h", "-t", "all", "-o", columns]
    text = call(words)
    jobs = {}
    for line in text.splitlines():
        parts = line.strip().split("|", 4)
        if len(parts) == 5:
            job = QueueJob(*parts)
            # A task that was requeued stands twice: the live record counts.
            if job.id not in jobs or job.live:
                jobs[job.id] = job
    return jobs


def history(ids: Iterable[str], slurm_cluster: str = "") -> dict[str, QueueJob]:
    """Return the jobs that a cluster's accounting remembers, {} where the site keeps none."""
    # Of a damaged file, only what is a number: the others would fail the call for all.
    bases = sorted({base for i in ids if (base := i.split("_")[0]).isdecimal()})
    if not bases:
        return {}
    columns = "JobID,State,ExitCode,NodeList"
    try:
        words = ["sacct", *on_cluster(slurm_cluster), "-X", "-n", "-P", "-o", columns]
        text = call([*words, "-j", ",".join(bases)])
    except SweepError:
        return {}
    jobs = {}
    for line in text.splitlines():
        parts = line.strip().split("|")
        if len(parts) >= 4:
            state = parts[1].split()[0] if parts[1] else ""  # "CANCELLED by 0"
            for name in tasks(parts[0]):
                jobs[name] = QueueJob(name, state, "", parts[3], "", parts[2])
    return jobs


def tasks(name: str) -> list[str]:
    """Return the ids behind one of sacct's: tasks that never started share `7_[1,3-5%2]`."""
    found = re.fullmatch(r"(\d+)_\[([\d,-]+)(?:%\d+)?\]", name)
    if found is None:
        return [name]
    ids = []
    for part in found[2].split(","):
        first, _, last = part.partition("-")
        ids += [f"{found[1]}_{i}" for i in range(int(first), int(last or first) + 1)]
    return ids


def max_array(slurm_cluster: str = "") -> int:
    """Return how many tasks one array may have (MaxArraySize; Slurm's default is 1001)."""
    text = call(["scontrol", *on_cluster(slurm_cluster), "show", "config"])
    found = re.search(r"(?m)^\s*MaxArraySize\s*=\s*(\d+)", text)
    return max(1, int(found[1])) if found else 1001


# --- submission -----------------------------------------------------------------------------------


def parameters(resources: Resources, batch: str, code: Path, logs: Path) -> dict[str, Any]:
    """Return submitit's Slurm parameters for a batch; `SweepError` for a path Slurm changes."""
    if {"%", "\\"} & {*str(logs)}:
        raise SweepError(f"Slurm replaces % and \\ in {logs}; type another paths.runs=FOLDER")
    extra: dict[str, Any] = {"requeue": True, "chdir": str(code)}
    extra |= {k: v for k, v in resources.extra.items() if v is not None and v is not False}
    chosen: dict[str, Any] = {
        "job_name": batch,
        "time": minutes(resources.time),
        "nodes": resources.nodes,
        "ntasks_per_node": resources.tasks,
        "cpus_per_task": resources.cpus,
        "signal_delay_s": resources.signal_s,
        "array_parallelism": resources.throttle,
        "additional_parameters": extra,
        # A rank that dies takes the others with it: they would wait in a collective for ever.
        "srun_args": ["--kill-on-bad-exit=1", *resources.srun],
        "setup": resources.setup or None,
        "teardown": [_teardown(logs)],
        **{key: getattr(resources, key) for key in OPTIONS},
        "gpus_per_node": resources.gpus if resources.gpu_count else None,
        "mem": resources.memory_gb and f"{round(resources.memory_gb * 1024)}M",
    }
    # Asked for in the site's own way: a second request would be refused, or added to the first.
    taken = {key for key, others in _ASKED_BY.items() if others & extra.keys()}
    if "cpus_per_task" not in taken:  # since 22.05 srun does not take it over from the job
        chosen["srun_args"].append(f"--cpus-per-task={resources.cpus}")
    found = {k: value for k, value in chosen.items() if value is not None and k not in taken}
    return {**found, "wckey": None}  # submitit's own is refused where a site keeps such keys


_ASKED_BY = {
    "gpus_per_node": {"gres", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task"},
    "mem": {"mem", "mem-per-cpu", "mem-per-gpu"},
    "cpus_per_task": {"cpus-per-gpu", "cpus-per-task"},
}


def _teardown(logs: Path) -> str:
    """Return the line that requeues a run in a container without scontrol, which leaves a file."""
    # The id of one task: the raw id of an array's last one would mean them all.
    one = "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
    asked = f'{shlex.quote(str(logs))}/"$one".requeue'
    return f'code=$?; one={one}; rm {asked} 2>/dev/null && scontrol requeue "$one"; exit $code'


def python(resources: Resources) -> str:
    """Return what starts Python in a job: this interpreter unless the resources name another."""
    return resources.python or shlex.quote(sys.executable)


def script(sweep: Sweep, resources: Resources, runs: int, code: Path) -> str:
    """Return, without Slurm, the script that `submit` makes."""
    from submitit.slurm.slurm import _make_sbatch_string

    command = f"{python(resources)} -u -m submitit.core._submit {shlex.quote(str(sweep.logs))}"
    options = parameters(resources, f"{sweep.name}.BATCH", code, sweep.logs)
    options |= {"map_count": runs} if runs > 1 else {}
    return _make_sbatch_string(command=command, folder=sweep.logs, **options)


def submit(
    sweep: Sweep, runs: Sequence[PlannedRun], resources: Resources, batch: JobBatch, after: str = ""
) -> dict[str, str]:
    """Submit an array that starts after the job `after`; return ids by run.

    The cluster that sbatch names in its answer is noted in the batch. `SweepError` if it was
    refused, another `UserError` if jobs of it are or may be in the queue.
    """
    import submitit

    from sweeps.jobs.sbatch import Executor

    def find_by_name(name: str) -> str | None:
        with contextlib.suppress(SweepError):
            for job in queue(batch.slurm_cluster).values():
                if job.name == name:
                    return job.id.partition("_")[0]
        return None

    executor = Executor(
        find_by_name, folder=sweep.logs, max_num_timeout=10_000, python=python(resources)
    )
    code = sweep.snapshots / batch.code
    options = parameters(resources, batch.name, code, sweep.logs)
    if after:
        options["additional_parameters"]["dependency"] = f"afterany:{after}"
    executor.update_parameters(**options)
    jobs = [Job.of(sweep, run, batch) for run in runs]
    try:
        # submitit prints what sbatch says; it is in the exception too.
        with _environment(code), contextlib.redirect_stderr(io.StringIO()), executor.batch():
            handles = [executor.submit(job) for job in jobs]
    except (submitit.core.utils.FailedJobError, subprocess.CalledProcessError) as error:
        reason = " ".join(str(getattr(error, "stderr", None) or error).split())[-400:]
        if "timed out" in reason:  # its controller may have the jobs: their name tells
            why = f"sbatch had no answer ({reason}); status tells what came through"
        elif after:
            why = f"sbatch refused {len(runs)} of the runs: {reason}; the same launch submits them"
        else:
            raise SweepError(f"sbatch refused: {reason}") from None
        raise UserError(why) from None
    batch.slurm_cluster = executor.slurm_cluster or batch.slurm_cluster
    return {run.name: handle.job_id for run, handle in zip(runs, handles, strict=True)}


# Variables that come before the script's own lines for sbatch: a job by another name would not be
# found again, one without our PYTHONPATH would not run the snapshot, and with WAIT sbatch stays.
_OVERRIDES_SCRIPT = {
    f"SBATCH_{option}"
    for option in (
        "ARRAY_INX", "CLUSTERS", "ERROR", "EXPORT", "INPUT", "JOB_NAME", "NO_REQUEUE", "OPEN_MODE",
        "OUTPUT", "REQUEUE", "SIGNAL", "TIMELIMIT", "WAIT",
    )
}  # fmt: skip


@contextlib.contextmanager
def _environment(code: Path) -> Iterator[None]:
    """Let sbatch pass the snapshot on, and nothing that was chosen for this process or its job."""
    before, passed = dict(os.environ), environment_of_jobs()
    for name in before:
        # A shell on a node has its own job's id, which submitit would take for the new one's.
        of_job = name.startswith(("SLURM_", "SLURMD_", "SUBMITIT_"))
        of_job = of_job and name not in ("SLURM_CONF", "SLURM_JWT")
        if name not in passed or of_job or name in _OVERRIDES_SCRIPT:
            del os.environ[name]
    os.environ["PYTHONPATH"] = python_path(code)
    try:
        yield
    finally:
        del os.environ["PYTHONPATH"]
        os.environ.update(before)
