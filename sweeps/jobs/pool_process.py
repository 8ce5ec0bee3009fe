"""The process of a pool: at most `workers` runs at once, each with its GPUs or a share of one.

On TERM it sends TERM to its runs, which save and stop.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from experiments.runtime import run_folder
from experiments.runtime.files import atomic_write
from experiments.runtime.locks import locked
from sweeps.jobs.job import REQUEUE, STOPPED, Job
from sweeps.jobs.job_end import KILLED
from sweeps.jobs.pool import states
from sweeps.jobs.pool_gpus import GpuSlots
from sweeps.plan.dependencies import is_parent_done, read_job
from sweeps.store.folder import Sweep
from sweeps.store.planned_run import PlannedRun


class Pool:
    """The queue and its workers, inside the pool's own process.

    Attributes:
        folder: Its state, and the runs that are to leave it.
        jobs: Files of the jobs, by run.
        logs: What the paths of their logs begin with.
        workers: How many run at once.
        needs: How many GPUs each run has, and how many runs share one.
        elsewhere: Other pools, by run, whose runs some of these wait for.
        slots: The GPUs that have room.
        queue: Runs that wait.
        live: Process and GPUs of each running run.
        ended: Runs that are done, failed or cancelled.
        failed: Those of them that failed.
        stopping: Whether TERM was received.
    """

    patience_s = 0.0  # how long a parent's results may take to appear

    def __init__(self, folder: Path) -> None:
        values = run_folder.read(folder / "pool.json")
        self.sweep = Sweep(Path(values["root"]), values["sweep"])
        self.folder = self.sweep.pools / folder.name
        self.jobs: dict[str, str] = values["jobs"]
        self.logs: str = values["logs"]
        self.workers: int = values["workers"]
        self.needs: dict[str, tuple[int, int]] = values.get("needs", {})
        self.slots = GpuSlots(values.get("gpus", []))
        self.elsewhere: dict[str, str] = values.get("elsewhere", {})
        self.queue = list(self.jobs)
        self.live: dict[str, tuple[subprocess.Popen[bytes], list[str]]] = {}
        self.ended: set[str] = set()
        self.failed: list[str] = []
        self.stopping = False
        self.started_at = time.monotonic()

    def state(self) -> str:
        """Return the content of state.json: who runs and who waits."""
        runs = dict.fromkeys(self.ended, "ENDED") | dict.fromkeys(self.queue, "PENDING")
        runs |= dict.fromkeys(self.live, "RUNNING")
        busy: list[str] = []
        for _, gpus in self.live.values():
            busy += gpus
        return json.dumps({"pid": os.getpid(), "runs": runs, "gpus": busy})

    def busy(self) -> bool:
        """Return whether there are runs to start or to wait for."""
        return bool(self.queue or self.live)

    def run(self) -> None:
        """Run until the queue is empty or TERM is received."""
        signal.signal(signal.SIGTERM, self._stop)
        written, last_tries = "", 100  # to write the last state, where the disk stays full
        while self.busy() or (self.state() != written and last_tries):
            if not self.busy():
                last_tries -= 1
            # On a full disk nothing starts, but what runs still has its pool.
            with contextlib.suppress(OSError):
                self._cancel()
                self._collect()
                if self.state() == written:
                    self._fill()
                state = self.state()
                if state != written:
                    atomic_write(self.folder / "state.json", state)
                    written = state
            time.sleep(0.1)

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self.stopping = True  # read by the loop, since a handler may run anywhere

    def _cancel(self) -> None:
        # Not the temporary files of one being written, which start with a dot.
        cancelled = [path.stem for path in self.folder.glob("[!.]*.cancel")]
        for run in self.jobs if self.stopping else cancelled:
            (self.folder / f"{run}.cancel").unlink(missing_ok=True)
            if run in self.queue:
                self.queue.remove(run)
            elif run in self.live and run not in self.ended:
                self.live[run][0].send_signal(signal.SIGTERM)
            self.ended.add(run)

    def _collect(self) -> None:
        """Handle runs that ended; one that asks for a requeue waits behind the others."""
        for run, (process, gpus) in list(self.live.items()):
            if process.poll() is None:
                continue
            del self.live[run]
            self.slots.release(gpus, self._needs_of(run)[1])
            if run in self.ended:  # cancelled
                continue
            if self.wants_requeue(process.returncode):
                self.queue.append(run)
                continue
            self.ended.add(run)
            if process.returncode not in (0, STOPPED):
                self.failed.append(run)
            if process.returncode == -9:  # SIGKILL, a name that Windows lacks
                # It could not note its end itself.
                Job(**run_folder.read(self.jobs[run])).note_end("failed", rank=0, error=KILLED)

    def wants_requeue(self, return_code: int) -> bool:
        """Return whether a run that ended with this code waits for another start."""
        return return_code == REQUEUE

    def _needs_of(self, run: str) -> tuple[int, int]:
        return self.needs.get(run, (0, 1))

    def _fill(self) -> None:
        """Start waiting runs on idle workers, each when what it needs has ended."""
        for run in list(self.queue):
            if len(self.live) >= self.workers:
                return
            planned = read_job(self.jobs[run])
            if planned is not None and self._waits(planned):
                continue
            if planned is not None and not is_parent_done(self.sweep, planned):
                if time.monotonic() - self.started_at < self.patience_s:
                    continue
                self.queue.remove(run)
                self.ended.add(run)
                continue
            count, runs_per_gpu = self._needs_of(run)
            gpus = self.slots.choose(count, runs_per_gpu)
            if gpus is None:
                return  # none overtakes a run that waits for its GPUs
            process = self._start(run, gpus)
            self.slots.take(gpus, runs_per_gpu)
            self.queue.remove(run)
            self.live[run] = process, gpus

    def _start(self, run: str, gpus: Sequence[str]) -> subprocess.Popen[bytes]:
        environment = dict(os.environ)  # as `start` set it
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        log = f"{self.logs}_{run}"
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        with open(f"{log}.out", "ab") as out, open(f"{log}.err", "ab") as err:
            return subprocess.Popen(
                [sys.executable, "-u", "-m", "sweeps.jobs.job", self.jobs[run]],
                env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            )  # fmt: skip

    def _waits(self, run: PlannedRun) -> bool:
        """Return whether a run that this one needs is queued or running, here or elsewhere."""
        for name in run.needs:
            if name in self.queue or name in self.live:
                return True
            other = self.elsewhere.get(name)
            if other is not None and states(self.sweep, other).get(name) in ("PENDING", "RUNNING"):
                return True
        return False


if __name__ == "__main__":  # the pool whose jobs are in this folder
    pool = Pool(Path(sys.argv[1]))
    with locked(pool.folder, wait_s=1.0):
        pool.run()
