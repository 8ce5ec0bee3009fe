"""Several runs that share the GPU of one Slurm task: each is a process with its own log.

The task is a small pool. A run that fails does not stop the others. USR2 and TERM reach all runs;
once they have saved, the task requeues itself and then restarts the unfinished ones.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import submitit

from experiments.runtime import run_folder
from sweeps import SweepError
from sweeps.jobs.job import REQUEUE, STOPPED, Job
from sweeps.jobs.job_process import check_code, expect_term, requeue, wait_for_end
from sweeps.jobs.pool import write_jobs
from sweeps.jobs.pool_process import Pool
from sweeps.store.folder import JobBatch, Sweep
from sweeps.store.planned_run import PlannedRun


@dataclass(frozen=True)
class SharedJob(submitit.helpers.Checkpointable):  # type: ignore[misc]
    """What is submitted for one task: its runs' jobs, and the folder for their files."""

    jobs: list[Job]
    folder: str

    @classmethod
    def create(cls, sweep: Sweep, runs: Sequence[PlannedRun], batch: JobBatch) -> SharedJob:
        """Return the job of runs that share a task of a batch."""
        jobs = [Job.create(sweep, run, batch) for run in runs]
        return cls(jobs, str(sweep.launches / batch.launch / batch.task_name(runs[0].name)))

    def __call__(self) -> None:
        """Run them (submitit calls this in the task).

        Raises:
            SweepError: Some failed; the others have ended, too.
        """
        first, folder = self.jobs[0], Path(self.folder)
        if first.code is not None:
            check_code(Path(first.code))
        cpus = int(os.environ.get("SLURM_CPUS_PER_TASK") or 0) // len(self.jobs)
        if cpus:
            os.environ.setdefault("OMP_NUM_THREADS", str(cpus))
        write_jobs(folder, self.jobs, workers=len(self.jobs))
        pool = TaskPool(folder, first.signal_s)
        pool.run()
        if pool.request is not None and (pool.queue or pool.live):
            _leave(first, pool.request)
        if pool.failed:
            raise SweepError(
                f"{len(pool.failed)} of {len(self.jobs)} runs failed: {', '.join(pool.failed)}; "
                "see their logs"
            )


class TaskPool(Pool):
    """The pool inside a task of Slurm: its runs stop and are requeued together.

    Attributes:
        request: The signal that was received, None before.
    """

    patience_s = 60.0  # for files that another node has written

    def __init__(self, folder: Path, signal_s: int) -> None:
        super().__init__(folder)
        earlier = run_folder.read(self.folder / "state.json").get("runs", {})  # before a requeue
        self.signal_s = signal_s
        self.request: int | None = None
        self._requested_at = 0.0
        self._forwarded = False
        for run in earlier if isinstance(earlier, dict) else ():
            if earlier[run] == "ENDED" and run in self.queue:
                self.queue.remove(run)
                self.ended.add(run)

    def run(self) -> None:
        """Work until all runs have ended, or have saved after a signal."""
        signal.signal(signal.SIGUSR2, self._stop)
        super().run()

    def busy(self) -> bool:
        """Return whether there is a run to wait for; Slurm ends those that ignore the signal."""
        if self.request is None:
            return super().busy()
        return bool(self.live) and time.monotonic() - self._requested_at < 0.9 * self.signal_s

    def wants_requeue(self, return_code: int) -> bool:
        """Return whether a run starts again with the task: it has saved, or had no handler yet."""
        signals = (-signal.SIGUSR2, -signal.SIGTERM)
        interrupted = self.request is not None and return_code in (*signals, STOPPED)
        return interrupted or super().wants_requeue(return_code)

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        if self.request is None:
            self.request, self._requested_at = number, time.monotonic()

    def _fill(self) -> None:
        if self.request is None:
            super()._fill()
        elif not self._forwarded and time.monotonic() - self._requested_at > 1.0:
            # Slurm signals all processes of a step; in a container it may reach this one only.
            self._forwarded = True
            for process, _ in self.live.values():
                process.send_signal(self.request)


def _leave(job: Job, request: int) -> None:
    """Requeue the task after USR2, and wait until Slurm ends it."""
    terminated = expect_term()
    if request == signal.SIGUSR2:
        print(f"the runs have saved; requeueing {job.id}", flush=True)
        if not requeue(str(job.id), job.launch):
            raise SystemExit(REQUEUE)
    wait_for_end(terminated)
