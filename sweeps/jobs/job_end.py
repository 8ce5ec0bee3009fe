"""Why a job ended that could not record it itself: from Slurm's states, and from its log."""

import contextlib
import os
import re
from pathlib import Path

from sweeps.jobs.slurm import QueueJob

# The last event of a run that was ended by SIGKILL; another process records it.
KILLED = "killed by signal 9 (out of memory?)"
_REASONS = {
    "": "its job is gone",
    "ENDED": "its process is gone",  # of a pool
    "OUT_OF_MEMORY": "out of memory (cluster.memory_gb= asks for more)",
    "TIMEOUT": "reached its time limit before it had saved (cluster.time=, cluster.signal_s=)",
    "NODE_FAIL": "its node failed",
    "BOOT_FAIL": "its node did not start",
    "DEADLINE": "its deadline passed",
}


def end_reason(job: QueueJob, slurm_lines: str) -> str:
    """Return in words why a job ended.

    Its exit code is `CODE:SIGNAL` in accounting, 128 + SIGNAL from a shell; Slurm's lines in the
    log are such as `srun: error: task 0: Killed`.
    """
    state = job.state
    if memory_ran_out(job, slurm_lines):
        return _REASONS["OUT_OF_MEMORY"]
    if state not in ("", "FAILED"):
        return _REASONS.get(state, state)
    code, _, number = job.exit.partition(":")
    signal_number = int(number or 0) or max(0, int(code or 0) - 128)
    causes = re.findall(r"tasks? [\d,-]+: (?!Exited)([A-Z][A-Za-z ]+)", slurm_lines)
    if signal_number == 9 or "Killed" in causes:
        return KILLED
    if signal_number:
        return f"killed by signal {signal_number}"
    if causes:
        return causes[-1].strip()
    exit_code = f" with exit code {code}" if code not in ("", "0") else ""
    return f"{_REASONS.get(state, state)}{exit_code}"


def memory_ran_out(job: QueueJob, slurm_lines: str) -> bool:
    """Return whether Slurm or the kernel ended a job since it used more main memory than it had.

    A bare SIGKILL may have other reasons, and a GPU that is full ends in an error of the run.
    """
    if job.state == "OUT_OF_MEMORY":
        return True
    text = slurm_lines.lower()
    signs = (
        "oom_kill",
        "oom-kill",
        "out of memory",
        "exceeded memory limit",
        "exceeded job memory",
    )
    return any(sign in text for sign in signs)


def read_from(path: Path, start: int | None = None) -> tuple[str, int | None]:
    """Return a log from `start` on (None: its last 4 KiB) and its end; "" if there is no file."""
    with contextlib.suppress(OSError), path.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - 4096) if start is None else start)
        return log.read().decode(errors="replace"), log.tell()
    return "", start


def last_lines(path: Path | None) -> tuple[str, str]:
    """Return the last line that a run wrote to its log, and Slurm's lines near the end."""
    last, slurm_lines = "", []
    for line in read_from(path)[0].splitlines() if path is not None else ():
        if line.startswith(("srun:", "slurmstepd", "submitit ")):
            slurm_lines.append(line)
        elif line.strip():
            last = line.strip()
    return last[:300], "\n".join(slurm_lines)
