"""The few collectives that scoring needs; with one process, each is the identity."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from experiments.metrics.distances import Moments


def world() -> tuple[int, int]:
    """Return (rank, number of processes)."""
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def share(n: int, rank: int | None = None) -> range:
    """Return a process's part of `n` items: consecutive, in rank order, of nearly equal size.

    Args:
        n: Number of items.
        rank: The process; None is this one.
    """
    own, size = world()
    rank = own if rank is None else rank
    return range(n * rank // size, n * (rank + 1) // size)


def _device() -> torch.device:
    """Return where the process group moves tensors: NCCL cannot send from the CPU."""
    on_gpu = "nccl" in torch.distributed.get_backend()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


@contextlib.contextmanager
def main_first() -> Iterator[None]:
    """Let the first process go through the block alone, then the others: a cache is filled once."""
    rank, size = world()
    if size > 1 and rank:
        torch.distributed.barrier()
    try:
        yield
    finally:
        if size > 1 and not rank:
            torch.distributed.barrier()


def everyone(flag: bool) -> bool:
    """Return whether `flag` is true in all processes.

    What they do next must not depend on who looked at the disk first.
    """
    if world()[1] == 1:
        return flag
    mine = torch.tensor([int(flag)], device=_device())
    torch.distributed.all_reduce(mine, torch.distributed.ReduceOp.MIN)
    return bool(mine.item())


def merge_moments(own: Moments) -> Moments:
    """Return the moments over all processes, merged in rank order: the same numbers everywhere."""
    if world()[1] == 1:
        return own
    total = Moments(own.dim)
    parts = (torch.tensor([own.n]), own.mean[None], own.scatter[None])
    for n, mean, scatter in zip(*map(gather_rows, parts), strict=True):
        total.merge_parts(int(n), mean, scatter)
    return total


def gather_rows(own: Tensor) -> Tensor:
    """Return every process's rows, concatenated in rank order, on the CPU.

    Args:
        own: With shape `(n, ...)`; n may differ between processes, and may be 0.
    """
    size = world()[1]
    if size == 1:
        return own.cpu()
    device = _device()
    count = torch.tensor([len(own)], device=device)
    counts = [torch.empty_like(count) for _ in range(size)]
    torch.distributed.all_gather(counts, count)
    lengths = [int(c) for c in counts]
    padded = torch.zeros(max(lengths), *own.shape[1:], dtype=own.dtype, device=device)
    padded[: len(own)] = own.to(device)
    parts = [torch.empty_like(padded) for _ in lengths]
    torch.distributed.all_gather(parts, padded)
    return torch.cat([part[:n].cpu() for part, n in zip(parts, lengths, strict=True)])
