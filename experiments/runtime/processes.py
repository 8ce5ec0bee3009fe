"""The processes of a command: one, or those of torchrun or Slurm, which share its work."""

from __future__ import annotations

import atexit
import os
from typing import Any

import torch
from torch import Tensor

from experiments.runtime.process_group import process_group
from routing.errors import UserError


def join(device: str | None = None) -> str | torch.device:
    """Join the processes of torchrun, if there are any; return this process's device.

    Args:
        device: The user's choice; None for CUDA if it is available.
    """
    gpu = torch.cuda.is_available()
    if process_group().world_size == 1:
        return device or ("cuda" if gpu else "cpu")
    from accelerate import PartialState

    check_accelerate_device()
    leave_at_exit()
    # Without a GPU, accelerate starts a process group only with cpu=True.
    return PartialState(cpu=device == "cpu" or not gpu).device


def check_accelerate_device() -> None:
    """Refuse an ACCELERATE_TORCH_DEVICE that is unusable here, before accelerate reads it."""
    name = os.environ.get("ACCELERATE_TORCH_DEVICE")
    if name is None:
        return
    try:
        torch.zeros(1, device=name).item()  # fails on `meta`, which has no values
    except (RuntimeError, AssertionError, NotImplementedError):
        raise UserError(
            f"ACCELERATE_TORCH_DEVICE={name}: expected a device that torch can use here, such as "
            "cpu, cuda or mps; unset it to use the best one available"
        ) from None


def leave_at_exit() -> None:
    """Destroy the process group before Python exits.

    Otherwise Gloo's threads release the last collective call after that, which aborts one in three
    processes that end right after it. NCCL has no such threads, and would wait for failed ranks.
    """
    atexit.register(_leave)


def _leave() -> None:
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


def world() -> tuple[int, int]:
    """Return (rank, number of processes)."""
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def share(n: int, rank: int | None = None) -> range:
    """Return a process's part of `n` items: consecutive, in rank order, of nearly equal size."""
    this_rank, size = world()
    rank = this_rank if rank is None else rank
    return range(n * rank // size, n * (rank + 1) // size)


def gather(value: Any) -> list[Any]:
    """Return the `value` of every process, in rank order; a collective call."""
    values = [value] * world()[1]
    if len(values) > 1:
        torch.distributed.all_gather_object(values, value)
    return values


def gather_rows(rows: Tensor) -> Tensor:
    """Return the rows (n, ...) of all processes, in rank order, on the CPU; n may differ."""
    return torch.cat(gather(rows.cpu()))
