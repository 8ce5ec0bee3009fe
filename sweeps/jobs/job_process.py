"""What a job's process is: its code, its node, its rank, and where in the code it failed."""

from __future__ import annotations

import os
import random
import socket
import sys
import traceback
from pathlib import Path


class RunFailed(RuntimeError):
    """A run's command returned a code other than 0, or ran other code than was submitted."""


def check_code(code: Path) -> None:
    """Make sure that this process runs the snapshot, and that its children will.

    Raises:
        RunFailed: The `sweeps` package came from somewhere else.
    """
    here = Path(__file__).resolve().parents[2]
    if here != code.resolve():
        raise RunFailed(
            f"the job imported sweeps from {here}, not from its snapshot {code}: "
            "PYTHONPATH or a .pth file of this environment comes first"
        )
    rest = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != str(code)]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(code), *rest])
    if str(code) not in sys.path:
        sys.path.insert(0, str(code))


def place(error: BaseException) -> str:
    """Return `file:line` of the innermost frame that is neither of this package nor installed."""
    frames = traceback.extract_tb(error.__traceback__)
    root = Path(__file__).resolve().parents[2]
    for frame in reversed(frames):
        path = Path(frame.filename)
        if "site-packages" in path.parts or path.parent == root / "sweeps":
            continue
        return (
            f"{path.relative_to(root) if path.is_relative_to(root) else path.name}:{frame.lineno}"
        )
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def host() -> str:
    """Return the node's name as Slurm calls it (several nodes may share a host name)."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def export_ranks() -> int:
    """Give torch.distributed its variables in a job of several tasks; return the rank."""
    tasks = int(os.environ.get("SLURM_NTASKS", 1))
    if tasks == 1:
        return 0
    import submitit

    env = submitit.JobEnvironment()
    # Another port after a requeue: the old one may linger.
    seed = f"{os.environ['SLURM_JOB_ID']}.{os.environ.get('SLURM_RESTART_COUNT', 0)}"
    os.environ.update(
        RANK=str(env.global_rank),
        WORLD_SIZE=str(tasks),
        LOCAL_RANK=str(env.local_rank),
        LOCAL_WORLD_SIZE=str(tasks // env.num_nodes),
        MASTER_ADDR=str(env.hostnames[0]),
        MASTER_PORT=str(random.Random(seed).randint(20000, 30000)),
    )
    return int(env.global_rank)
