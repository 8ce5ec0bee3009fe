"""The process group in the environment: torchrun's variables, checked (no torch here)."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from routing.errors import require

#: Variables that torchrun, `accelerate launch` and the jobs of a sweep set in each process.
REQUIRED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
#: Variables in which MPI launchers and srun store the number of processes; accelerate reads them.
MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_ADVICE = "start several processes with torchrun, or unset RANK, WORLD_SIZE and LOCAL_RANK for one"


@dataclass(frozen=True)
class ProcessGroup:
    """Rank of this process among those of a launch; the defaults are a single process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0


def process_group() -> ProcessGroup:
    """Return the process group of the environment.

    With stale or incomplete variables, each process would do a part of the work, or wait for others
    that never start.

    Raises:
        UserError: A variable is missing, empty, no integer, or contradicts the others.
    """
    world_size = _whole_number("WORLD_SIZE", 1, least=1)
    group = ProcessGroup(_whole_number("RANK", 0), world_size, _whole_number("LOCAL_RANK", 0))
    local_size = _whole_number("LOCAL_WORLD_SIZE", world_size, least=1)
    size_text = f"WORLD_SIZE={world_size}" if "WORLD_SIZE" in os.environ else "WORLD_SIZE not set"
    _check(group.rank < world_size, f"RANK={group.rank} with {size_text}")
    _check(local_size <= world_size, f"LOCAL_WORLD_SIZE={local_size} with {size_text}")
    _check(
        group.local_rank < local_size,
        f"LOCAL_RANK={group.local_rank} with {size_text}, LOCAL_WORLD_SIZE={local_size}",
    )
    # A process with a local rank joins a group even when it is the only one.
    if world_size > 1 or "LOCAL_RANK" in os.environ:
        missing = [name for name in REQUIRED if not os.environ.get(name)]
        cause = size_text if world_size > 1 else f"LOCAL_RANK={group.local_rank}"
        _check(not missing, f"{cause} without {', '.join(missing)}")
        _whole_number("MASTER_PORT", 1, least=1, most=65535)
        _check_host(os.environ["MASTER_ADDR"])
    if world_size == 1:
        for name in MPI_SIZES:
            processes = _whole_number(name, 1, least=1)
            _check(processes == 1, f"{name}={processes} (from MPI or srun) with {size_text}")
    return group


def _check_host(name: str) -> None:
    """Refuse a host name that cannot be resolved; torch would retry it for minutes."""
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError):  # a label of more than 63 characters is no host name
        _check(False, f"MASTER_ADDR={name[:80]!r} (expected the name or address of a host)")


def _whole_number(name: str, default: int, least: int = 0, most: int = 10**6) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    valid = text.isascii() and text.isdecimal() and least <= int(text[:20]) <= most
    limits = f"{least} to {most}" if most < 10**6 else f"{least} or more"
    _check(valid, f"{name}={text[:40]!r} (expected a whole number, {limits})")
    return int(text)


def _check(valid: bool, problem: str) -> None:
    require(valid, f"the environment has {problem}: {_ADVICE}")
