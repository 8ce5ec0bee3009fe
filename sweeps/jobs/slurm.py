"""What Slurm knows about jobs: one squeue call, and one sacct call for those it has forgotten."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sweeps.errors import SweepError

LIVE = {
    "PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD",
    "REQUEUE_FED", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SPECIAL_EXIT",
}  # fmt: skip
RUNNING = {"RUNNING", "COMPLETING", "CONFIGURING", "SIGNALING", "STAGE_OUT", "SUSPENDED"}

# What Slurm's clients say where they are installed and find no controller.
_NO_CLUSTER = ("establish a configuration source", "Unable to contact slurm controller")


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


def call(words: Sequence[str], timeout: float = 60.0) -> str:
    """Run one Slurm command (a list of words, never a shell) and return what it printed.

    Raises:
        SweepError: It is not installed, does not answer or refuses.
    """
    if shutil.which(words[0]) is None:
        raise SweepError(
            f"{words[0]} is not on PATH: this is no Slurm login node; "
            "use cluster=local or cluster=debug"
        )
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, check=True)
    except subprocess.TimeoutExpired:
        raise SweepError(
            f"{words[0]} gave no answer in {timeout:.0f} s; is slurmctld up?"
        ) from None
    except subprocess.CalledProcessError as error:
        reason = " ".join(error.stderr.split()) or f"exit code {error.returncode}"
        if any(sign in reason for sign in _NO_CLUSTER):
            raise SweepError(
                f"no Slurm cluster answers {words[0]} here; type it where one does, or use "
                "cluster=local"
            ) from None
        raise SweepError(f"{words[0]}: {reason}") from None
    return done.stdout


def queue() -> dict[str, QueueJob]:
    """Return the caller's jobs by id, array tasks one by one, those that just ended included."""
    text = call(["squeue", "--me", "-r", "-h", "-t", "all", "-o", "%i|%T|%r|%N|%j"])
    jobs = {}
    for line in text.splitlines():
        parts = line.strip().split("|", 4)
        if len(parts) == 5:
            job = QueueJob(parts[0], parts[1], parts[2], parts[3], parts[4])
            # A task that was requeued stands twice: the live record counts.
            if job.id not in jobs or job.live:
                jobs[job.id] = job
    return jobs


def history(ids: Iterable[str]) -> dict[str, QueueJob]:
    """Return the jobs that accounting remembers, {} where the site keeps none."""
    bases = sorted({i.split("_")[0] for i in ids}, key=int)
    if not bases or shutil.which("sacct") is None:
        return {}
    words = [
        "sacct",
        "-X",
        "-n",
        "-P",
        "-o",
        "JobID,State,ExitCode,NodeList",
        "-j",
        ",".join(bases),
    ]
    try:
        text = call(words)
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


def cancel(ids: Sequence[str]) -> None:
    """Cancel jobs, a few hundred per call."""
    for start in range(0, len(ids), 200):
        call(["scancel", *ids[start : start + 200]])


def max_array() -> int:
    """Return how many tasks one array may have here (MaxArraySize; Slurm's default is 1001)."""
    for line in call(["scontrol", "show", "config"]).splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "MaxArraySize":
            return max(1, int(value))
    return 1001


def own_id() -> str | None:
    """Return the id that `scontrol requeue` needs for this process's job, None outside Slurm.

    The raw job id is wrong for the one task of an array whose raw id equals the array's: it means
    them all.
    """
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")
