"""The process of a job: the code that it runs, its node and rank, and how it ends early on Slurm.

A job that Slurm interrupts requeues itself, then waits until Slurm ends it.
"""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import NoReturn

from experiments.runtime.errors import ROOT
from experiments.runtime.files import atomic_write
from experiments.runtime.process_group import process_group
from routing.errors import require
from sweeps import SweepError
from sweeps.jobs.snapshot import python_path


def check_code(code: Path) -> None:
    """Make child processes run the copy `code`; raise `SweepError` if this process does not."""
    require(
        code.resolve() == ROOT,
        f"the job imported sweeps from {ROOT}, not from its copy {code}: "
        "PYTHONPATH or a .pth file of this environment comes first",
        SweepError,
    )
    os.environ["PYTHONPATH"] = python_path(code)
    if str(code) not in sys.path:
        sys.path.insert(0, str(code))


def error_place(error: BaseException) -> str:
    """Return `file:line` of the innermost frame that is neither in this package nor installed."""
    place = ""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
        if "site-packages" not in path.parts and not path.is_relative_to(ROOT / "sweeps"):
            return f"{name}:{frame.lineno}"
        place = place or f"{name}:{frame.lineno}"
    return place  # of the innermost frame of all


def host() -> str:
    """Return the node's name as Slurm has it (several nodes may share a host name)."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def job_rank(on_slurm: bool) -> int:
    """Return the rank of this process; on Slurm, set the variables of torch.distributed for it."""
    if not on_slurm:
        return process_group().rank
    if int(os.environ.get("SLURM_NTASKS", 1)) == 1:
        return 0
    import submitit

    # Another port after a requeue: the old one may linger.
    seed = f"{os.environ['SLURM_JOB_ID']}.{os.environ.get('SLURM_RESTART_COUNT', 0)}"
    os.environ["MASTER_PORT"] = str(random.Random(seed).randint(20000, 30000))
    distributed = submitit.helpers.TorchDistributedEnvironment()
    return int(distributed.export(set_cuda_visible_devices=False, overwrite=True).rank)


def requeue(job_id: str, launch: Path) -> bool:
    """Requeue a job or array task (`7_2`); False if its script must, once this process has ended.

    Raises:
        SweepError: Slurm refuses.
    """
    if shutil.which("scontrol") is None:  # in a container: the script, outside, looks for this file
        atomic_write(launch / f"{job_id}.requeue", "")
        return False
    command = ["scontrol", "requeue", job_id]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if process.returncode:
        reason = " ".join(process.stderr.split())
        raise SweepError(f"scontrol requeue {job_id}: {reason}; resume it: launch with --retry")
    return True


def expect_term() -> threading.Event:
    """Return an event that Slurm's TERM sets; call it before the requeue that sends TERM."""
    terminated = threading.Event()
    signal.signal(signal.SIGTERM, lambda _number, _frame: terminated.set())
    return terminated


def wait_for_end(terminated: threading.Event) -> NoReturn:
    """Wait for Slurm's TERM, since Slurm takes a job that leaves early for one that has failed."""
    # At TERM the job leaves at once; Slurm would kill it after another KillWait (30 s by default).
    terminated.wait(900.0)
    raise SystemExit(128 + signal.SIGTERM)
