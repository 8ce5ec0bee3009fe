"""Reading the batches of a data set ahead of the steps that need them."""

from __future__ import annotations

import itertools
import sys
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
    """Iterates over the batches of steps `start..stop-1`, each a function of its step alone.

    A thread reads ahead from disk. Its errors are raised when their batch is due. Leaving the loop
    ends the thread. `plan` returns a step's sample indices (on the CPU) and random numbers. A
    `stop` of None is endless.
    """

    dataset: Dataset
    plan: Callable[[int], tuple[Tensor, Draws]]
    start: int = 0
    stop: int | None = None

    def __iter__(self) -> Iterator[Batch]:
        steps = range(self.start, sys.maxsize if self.stop is None else self.stop)
        # If the loop is never closed (an error, a signal), the pool's thread is joined at exit.
        pool = ThreadPoolExecutor(1)
        ahead = iter(steps)
        waiting: deque[Future[Rows]] = deque()
        try:
            for step in steps:
                for read in itertools.islice(ahead, _AHEAD + 1 - len(waiting)):
                    waiting.append(pool.submit(self._read, read))
                yield self.dataset.assemble(waiting.popleft().result(), *self.plan(step), "train")
        finally:
            pool.shutdown(cancel_futures=True)

    def _read(self, step: int) -> Rows:
        rows = self.dataset.rows(*self.plan(step))
        return rows.pin() if self.dataset.device.type == "cuda" else rows
