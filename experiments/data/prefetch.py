"""Reading the batches of a data set ahead of the steps that need them."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from experiments.data.dataset import Batch, Dataset, Rows
from routing.rng import Draws

_AHEAD = 3  # batches that are read before they are needed


@dataclass
class Prefetch:
    """Iterates over the batches of the steps from `start` on, each a function of its step alone.

    A thread reads ahead from disk. Its errors are raised when their batch is due. Leaving the loop
    ends the thread. `plan` returns a step's sample indices (on the CPU) and random numbers.
    """

    dataset: Dataset
    plan: Callable[[int], tuple[Tensor, Draws]]
    start: int = 0

    def __iter__(self) -> Iterator[Batch]:
        # If the loop is never closed (an error, a signal), the pool's thread is joined at exit.
        pool = ThreadPoolExecutor(1)
        waiting: deque[Future[Rows]] = deque()
        for step in range(self.start, self.start + _AHEAD):
            waiting.append(pool.submit(self._read, step))
        try:
            for step in itertools.count(self.start):
                waiting.append(pool.submit(self._read, step + _AHEAD))
                yield self.dataset.assemble(waiting.popleft().result(), *self.plan(step), "train")
        finally:
            pool.shutdown(cancel_futures=True)

    def _read(self, step: int) -> Rows:
        rows = self.dataset.rows(*self.plan(step))
        return rows.pin() if self.dataset.device.type == "cuda" else rows
