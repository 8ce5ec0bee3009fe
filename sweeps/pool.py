"""A pool on this machine: at most `workers` runs at once, each with GPUs of its own.

The pool is one process that outlives the shell that started it. Its lock shows whether it is alive;
on TERM it sends TERM to its runs, which save and stop.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

import psutil

from experiments.runtime import run_folder
from experiments.runtime.files import atomic_write
from experiments.runtime.locks import is_locked, locked
from sweeps import SweepError
from sweeps.dependencies import is_parent_done, read_job
from sweeps.folder import JobBatch, Sweep
from sweeps.job import KILLED, REQUEUE, Job
from sweeps.planned_run import PlannedRun
from sweeps.snapshot import job_environment


def start(
    sweep: Sweep, runs: Sequence[PlannedRun], worker_gpus: Sequence[list[str] | None],
    batch: JobBatch, live_jobs: Mapping[str, str] | None = None,
) -> dict[str, str]:  # fmt: skip
    """Start a pool that outlives this process; return ids by run.

    Args:
        sweep: The sweep.
        runs: Its runs.
        worker_gpus: GPUs of each worker, None for one without.
        batch: Their submission.
        live_jobs: Job ids, by run, of runs in other pools that some of these wait for.

    Raises:
        SweepError: It did not start.
    """
    folder, code = sweep.pools / batch.name, sweep.snapshots / batch.code
    folder.mkdir(parents=True)
    files = {}
    for run in runs:
        files[run.name] = str(folder / f"{run.name}.json")
        atomic_write(files[run.name], json.dumps(Job.create(sweep, run, batch).__dict__))
    values = {
        "jobs": files,
        "workers": list(worker_gpus),
        "logs": str(sweep.logs),
        "elsewhere": {run: job.partition("/")[0] for run, job in (live_jobs or {}).items()},
    }
    atomic_write(folder / "pool.json", json.dumps(values))
    environment = job_environment(code)
    # The runs share the cores; `train.threads` or OMP_NUM_THREADS override this.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (cores or 1) // len(worker_gpus))))
    with (folder / "pool.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "sweeps.pool", str(folder)], cwd=code, env=environment,
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    state = folder / "state.json"
    for _ in range(3000):  # a minute
        if process.poll() is not None or state.is_file():
            break
        time.sleep(0.02)
    if not state.is_file():
        process.terminate()  # avoid orphaned runs
        raise SweepError(f"the pool did not start; see {folder / 'pool.log'}")
    process.returncode = 0  # it outlives this command on purpose: no warning about that
    return {run.name: f"{batch.name}/{run.name}" for run in runs}


def states(sweep: Sweep, batch: str) -> dict[str, str]:
    """Return PENDING, RUNNING or ENDED by run; of a pool that is gone, the runs that go on."""
    folder = sweep.pools / batch
    runs = run_folder.read(folder / "state.json").get("runs", {})
    if is_locked(folder):
        return {run: str(state) for run, state in runs.items()}
    return dict.fromkeys(_orphans(folder) if "RUNNING" in runs.values() else (), "RUNNING")


def _orphans(folder: Path) -> dict[str, psutil.Process]:
    """Return the workers that a killed pool has left, by run."""
    processes = list(psutil.process_iter(["cmdline"]))
    # A forked data worker has the command line of its worker, and a higher number.
    processes.sort(key=lambda process: process.pid, reverse=True)
    workers = {}
    for process in processes:
        file = Path((process.info["cmdline"] or [""])[-1])
        if file.parent == folder:
            workers[file.stem] = process
    return workers


def cancel(sweep: Sweep, batch: str, run: str) -> None:
    """Remove a run from a pool: a waiting one leaves the queue, a running one gets TERM."""
    folder = sweep.pools / batch
    if is_locked(folder):
        atomic_write(folder / f"{run}.cancel", "")
        return
    worker = _orphans(folder).get(run)
    if worker is not None:
        worker.terminate()


class Pool:
    """The queue and its workers, inside the pool's own process.

    Attributes:
        jobs: Files of the jobs, by run.
        elsewhere: Other pools, by run, whose runs some of these wait for.
        idle: GPUs of each worker without a run.
        queue: Runs that wait.
        live: Process and GPUs of each running run.
        ended: Runs that are done, failed or cancelled.
        stopping: Whether TERM has come.
    """

    def __init__(self, folder: Path) -> None:
        values = run_folder.read(folder / "pool.json")
        self.folder = folder
        self.jobs: dict[str, str] = values["jobs"]
        self.logs = Path(values["logs"])
        self.idle: list[list[str] | None] = values["workers"]
        self.sweep = Sweep(folder.parents[3], folder.parents[1].name)
        self.elsewhere: dict[str, str] = values.get("elsewhere", {})
        self.queue = list(self.jobs)
        self.live: dict[str, tuple[subprocess.Popen[bytes], list[str] | None]] = {}
        self.ended: set[str] = set()
        self.stopping = False

    def state(self) -> str:
        """Return the content of state.json: who runs and who waits."""
        runs = dict.fromkeys(self.ended, "ENDED") | dict.fromkeys(self.queue, "PENDING")
        runs |= dict.fromkeys(self.live, "RUNNING")
        busy: list[str] = []
        for _, gpus in self.live.values():
            busy += gpus or ()
        return json.dumps({"pid": os.getpid(), "runs": runs, "gpus": busy})

    def run(self) -> None:
        """Work until the queue is empty or TERM has come."""
        signal.signal(signal.SIGTERM, self._stop)
        written, last_tries = "", 100  # to write the last state, where the disk stays full
        while self.queue or self.live or (self.state() != written and last_tries):
            if not (self.queue or self.live):
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
            self.idle.append(gpus)
            if run in self.ended:  # cancelled
                continue
            if process.returncode == REQUEUE:
                self.queue.append(run)
                continue
            self.ended.add(run)
            if process.returncode == -9:  # SIGKILL, a name that Windows lacks
                # It could not note its end itself.
                Job(**run_folder.read(self.jobs[run])).note_end("failed", rank=0, error=KILLED)

    def _fill(self) -> None:
        """Start waiting runs on idle workers, each when what it needs has ended."""
        for run in list(self.queue):
            if not self.idle:
                return
            planned = read_job(self.jobs[run])
            if planned is not None and self._waits(planned):
                continue
            if planned is not None and not is_parent_done(self.sweep, planned):
                self.queue.remove(run)
                self.ended.add(run)
                continue
            gpus = self.idle[0]
            environment = dict(os.environ)  # as `start` set it
            if gpus is not None:
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
            self.logs.mkdir(parents=True, exist_ok=True)
            log = str(self.logs / f"{self.folder.name}_{run}")
            with open(f"{log}.out", "ab") as out, open(f"{log}.err", "ab") as err:
                process = subprocess.Popen(
                    [sys.executable, "-u", "-m", "sweeps.job", self.jobs[run]],
                    env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                )  # fmt: skip
            del self.idle[0]
            self.queue.remove(run)
            self.live[run] = process, gpus

    def _waits(self, run: PlannedRun) -> bool:
        """Return whether a run that this one needs is queued or running, here or elsewhere."""
        for name in run.needs:
            if name in self.queue or name in self.live:
                return True
            other = self.elsewhere.get(name)
            if other is not None and states(self.sweep, other).get(name) in ("PENDING", "RUNNING"):
                return True
        return False


if __name__ == "__main__":  # the pool of the folder on the command line
    with locked(Path(sys.argv[1]), wait_s=1.0):
        Pool(Path(sys.argv[1])).run()
