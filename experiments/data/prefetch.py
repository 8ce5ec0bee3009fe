"""Read the next batches from disk while the current one trains: one thread, page-locked memory."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from experiments.data.dataset import Batch, Dataset, Rows
from routing.rng import Draws

Plan = Callable[[int], tuple[Tensor, Draws]]


class Prefetch:
    """The batches of steps `start..stop-1`, each a function of its step alone.

    Data sets that compute their samples are simply asked; those that read files are read ahead by a
    thread. Its errors are raised where the batch is asked for. Leaving the loop ends the thread.

    Args:
        dataset: Where batches come from.
        plan: Gives a step's sample indices (on the CPU) and its random numbers.
        start: First step.
        stop: One past the last step; None is endless.
        depth: Batches that may wait.
        split: `train` or `test`.
    """

    def __init__(
        self,
        dataset: Dataset,
        plan: Plan,
        start: int = 0,
        stop: int | None = None,
        *,
        depth: int = 3,
        split: str = "train",
    ) -> None:
        self.dataset, self.plan, self.split = dataset, plan, split
        self.start, self.stop, self.depth = start, stop, depth

    def __iter__(self) -> Iterator[Batch]:
        steps = range(self.start, sys.maxsize if self.stop is None else self.stop)
        if not self.dataset.reads_disk:
            for step in steps:
                yield self.dataset.batch(*self.plan(step), self.split)
            return
        # A loop that is never left (an error, a signal): the pool's thread is joined at exit.
        pool = ThreadPoolExecutor(1)
        ahead = iter(steps)
        waiting: deque[Future[Rows]] = deque()
        try:
            for step in steps:
                for read in itertools.islice(ahead, self.depth + 1 - len(waiting)):
                    waiting.append(pool.submit(self._read, read))
                rows = waiting.popleft().result()
                yield self.dataset.batch(*self.plan(step), self.split, rows)
        finally:
            pool.shutdown(cancel_futures=True)

    def _read(self, step: int) -> Rows:
        rows = self.dataset.rows(*self.plan(step), self.split)
        return rows.pin() if self.dataset.device.type == "cuda" else rows
