"""A variant of the benchmark in a process of its own, timed there, in turn with the others.

A plain training loop leaves the C library's allocator as it is and ours does not
(`experiments.runtime.memory`); within one process both would have the same.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import torch

from experiments.benchmark.bench_options import BenchError, BenchOptions
from experiments.benchmark.step_times import Case, Clock, Step


class StepElsewhere:
    """A CPU step in a process of its own; a call returns the seconds that it took there.

    Args:
        case: What.
        o: How.

    Raises:
        BenchError: by a call, if the process has ended.
    """

    def __init__(self, case: Case, o: BenchOptions) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, far = context.Pipe()
        threads = torch.get_num_threads()
        self.process = context.Process(target=_serve, args=(far, case, o, threads), daemon=True)
        self.process.start()
        far.close()

    def __call__(self) -> float:
        """Take one training step."""
        try:
            self.pipe.send(True)
            return float(self.pipe.recv())
        except (EOFError, OSError):
            raise BenchError(
                f"the process of the plain step ended (exit code {self.process.exitcode}); type "
                "plain=false to leave it out"
            ) from None

    def close(self) -> None:
        """End the process."""
        self.pipe.close()
        self.process.join()


def _serve(pipe: Connection, case: Case, o: BenchOptions, threads: int) -> None:
    torch.set_num_threads(threads)
    device = torch.device("cpu")
    step, clock = Step(case, o, device), Clock(device, o.clock)
    try:
        while pipe.recv():
            pipe.send(clock(step))
    except (EOFError, KeyboardInterrupt):
        pass
