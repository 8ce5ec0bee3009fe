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
    """Return a process's part of `n` items: consecutive, in rank order, of nearly equal size."""
    own, size = world()
    rank = own if rank is None else rank
    return range(n * rank // size, n * (rank + 1) // size)


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
    """Return every process's rows (n, ...), in rank order, on the CPU; n may differ."""
    own, size = own.cpu(), world()[1]
    if size == 1:
        return own
    parts: list[Tensor] = [own] * size
    torch.distributed.all_gather_object(parts, own)
    return torch.cat(parts)
