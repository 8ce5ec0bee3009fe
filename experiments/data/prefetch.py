"""Read the next batches from disk while the current one trains: one thread, page-locked memory."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable, Iterator

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

    def _steps(self) -> Iterator[int]:
        step = self.start
        while self.stop is None or step < self.stop:
            yield step
            step += 1

    def __iter__(self) -> Iterator[Batch]:
        if not self.dataset.reads_disk:
            for step in self._steps():
                index, draws = self.plan(step)
                yield self.dataset.batch(index, draws, self.split)
            return
        ready: queue.Queue[tuple[int, Rows] | BaseException | None] = queue.Queue(self.depth)
        left = threading.Event()
        thread = threading.Thread(target=self._read, args=(ready, left), daemon=True)

        def end() -> None:
            left.set()
            thread.join()

        # A loop that is never left (an error, a signal) must not kill the thread inside torch at
        # exit.
        atexit.register(end)
        thread.start()
        try:
            while (item := ready.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                step, rows = item
                index, draws = self.plan(step)
                yield self.dataset.batch(index, draws, self.split, rows)
        finally:
            end()
            atexit.unregister(end)

    def _read(
        self,
        ready: queue.Queue[tuple[int, Rows] | BaseException | None],
        left: threading.Event,
    ) -> None:
        def give(item: tuple[int, Rows] | BaseException | None) -> bool:
            while not left.is_set():
                try:
                    ready.put(item, timeout=0.1)
                    return True
                except queue.Full:
                    continue
            return False

        try:
            for step in self._steps():
                index, draws = self.plan(step)
                rows = self.dataset.rows(index, draws, self.split)
                if self.dataset.device.type == "cuda":
                    rows = rows.pin()
                if not give((step, rows)):
                    return
            give(None)
        except BaseException as error:
            give(error)
