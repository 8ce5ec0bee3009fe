"""Calls of Slurm's commands: one squeue and one sacct call per cluster show all jobs."""

import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from routing.errors import require
from sweeps import SweepError

RUNNING = {"RUNNING", "COMPLETING", "CONFIGURING", "SIGNALING", "STAGE_OUT", "SUSPENDED"}
LIVE = RUNNING | {
    "PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESIZING", "STOPPED", "SPECIAL_EXIT",
}  # fmt: skip


@dataclass(frozen=True)
class QueueJob:
    """One job or array task as Slurm reports it; `exit` is `CODE:SIGNAL`, `folder` its own."""

    id: str
    state: str
    reason: str = ""
    node: str = ""
    name: str = ""
    exit: str = ""
    folder: str = ""

    @property
    def live(self) -> bool:
        """Whether it is in the queue or running."""
        return self.state in LIVE

    @property
    def running(self) -> bool:
        """Whether it holds a node."""
        return self.state in RUNNING


def call(command: Sequence[str]) -> str:
    """Return what a Slurm command printed.

    Raises:
        SweepError: It failed or gave no answer within a minute.
    """
    # Only the arguments decide which jobs are listed: `SLURM_CLUSTERS` asks another cluster, and
    # `SQUEUE_PARTITION` and the like hide jobs, which would then be submitted again.
    hidden = ("SQUEUE_", "SACCT_", "SCANCEL_", "SLURM_CLUSTERS")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
    config_file = environment.get("SLURM_CONF")
    require(
        not config_file or os.path.exists(config_file),  # Slurm would try it for a minute
        f"SLURM_CONF={config_file}: no such file",
        SweepError,
    )
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=True, env=environment
        )
    except (OSError, subprocess.SubprocessError) as error:
        reason = " ".join(str(getattr(error, "stderr", None) or error).split())
        advice = "without a Slurm cluster use cluster=local or cluster=debug"
        raise SweepError(f"{command[0]}: {reason}; {advice}") from None
    return process.stdout


def on_cluster(slurm_cluster: str) -> list[str]:
    """Return the arguments that send a Slurm command to a cluster; none for the default one."""
    return ["-M", slurm_cluster] if slurm_cluster else []


def queue(slurm_cluster: str = "") -> dict[str, QueueJob]:
    """Return the caller's jobs by id, array tasks one by one, those that just ended included.

    Job ids are unique within a cluster only, so each cluster is asked separately.
    """
    columns = "%i|%T|%r|%N|%j|%Z"
    options = ["--me", "-r", "-h", "-t", "all", "-o", columns]
    jobs: dict[str, QueueJob] = {}
    for line in call(["squeue", *on_cluster(slurm_cluster), *options]).splitlines():
        parts = line.strip().split("|", 5)
        if len(parts) == 6:
            job_id, state, reason, node, name, folder = parts
            job = QueueJob(job_id, state, reason, node, name, folder=folder)
            # A requeued task has two records, of which the live one counts.
            if job.id not in jobs or job.live:
                jobs[job.id] = job
    return jobs


def history(ids: Iterable[str], slurm_cluster: str = "") -> dict[str, QueueJob]:
    """Return ended jobs from a cluster's accounting by id, {} where the site keeps none."""
    # One id that is not a number, from a damaged file, would fail the call for all.
    bases = sorted({job_id.split("_")[0] for job_id in ids})
    bases = [base for base in bases if base.isdecimal()]
    if not bases:
        return {}
    columns = "JobID,State,ExitCode,NodeList"
    options = ["-X", "-n", "-P", "-o", columns, "-j", ",".join(bases)]
    try:
        text = call(["sacct", *on_cluster(slurm_cluster), *options])
    except SweepError:
        return {}
    jobs = {}
    for line in text.splitlines():
        parts = line.strip().split("|")
        if len(parts) >= 4:
            state = parts[1].split()[0] if parts[1] else ""  # "CANCELLED by 0"
            for task in task_ids(parts[0]):
                jobs[task] = QueueJob(task, state, node=parts[3], exit=parts[2])
    return jobs


def task_ids(record: str) -> list[str]:
    """Return the ids behind a record of sacct: tasks that never started share `7_[1,3-5%2]`."""
    match = re.fullmatch(r"(\d+)_\[([\d,-]+)(?:%\d+)?\]", record)
    if match is None:
        return [record]
    ids = []
    for part in match[2].split(","):
        first, _, last = part.partition("-")
        for task in range(int(first), int(last or first) + 1):
            ids.append(f"{match[1]}_{task}")
    return ids


def set_throttle(array_id: str, throttle: int, slurm_cluster: str = "") -> None:
    """Change how many tasks of a live array may run at once.

    Raises:
        SweepError: Slurm refuses, as where the array has ended.
    """
    change = ["update", f"JobId={array_id}", f"ArrayTaskThrottle={throttle}"]
    call(["scontrol", *on_cluster(slurm_cluster), *change])


def max_array(slurm_cluster: str = "") -> int:
    """Return how many tasks one array may have (MaxArraySize; Slurm's default is 1001)."""
    text = call(["scontrol", *on_cluster(slurm_cluster), "show", "config"])
    match = re.search(r"(?m)^\s*MaxArraySize\s*=\s*(\d+)", text)
    return max(1, int(match[1])) if match else 1001
