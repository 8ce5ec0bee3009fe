"""How a job on Slurm ends early: it requeues itself, then waits until Slurm ends it."""

import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import NoReturn

from experiments.runtime.files import atomic_write
from sweeps import SweepError


def requeue(job_id: str, logs: Path) -> bool:
    """Requeue a job; False if its script has to, which waits for this process to end.

    Args:
        job_id: Its id, `7_2` for a task of an array.
        logs: Folder of the jobs' output.

    Raises:
        SweepError: Slurm refuses.
    """
    if shutil.which("scontrol") is None:  # in a container: the script, outside, looks for this file
        atomic_write(logs / f"{job_id}.requeue", "")
        return False
    command = ["scontrol", "requeue", job_id]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if process.returncode:
        reason = " ".join(process.stderr.split())
        raise SweepError(f"scontrol requeue {job_id}: {reason}; python -m sweeps retry goes on")
    return True


def expect_term() -> threading.Event:
    """Return an event that Slurm's TERM sets; call it before the requeue that sends TERM."""
    terminated = threading.Event()
    signal.signal(signal.SIGTERM, lambda _number, _frame: terminated.set())
    return terminated


def wait_for_end(terminated: threading.Event) -> NoReturn:
    """Wait for Slurm's TERM, since Slurm takes a job that leaves early for one that has failed."""
    terminated.wait(900.0)  # its KILL would come later
    raise SystemExit(128 + signal.SIGTERM)
