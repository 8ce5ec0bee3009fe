"""Workers on this machine: at most `workers` runs at once, each with a GPU of its own.

The pool is one process that outlives the shell that started it. Its lock tells whether it lives;
TERM makes it hand TERM to its runs, which save and stop.
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

import psutil

from experiments.runtime import run_folder
from experiments.runtime.command import environment_of_jobs
from experiments.runtime.files import atomic_write, is_locked, locked
from experiments.runtime.memory import visible_gpus
from sweeps import SweepError
from sweeps.jobs.cluster_resources import Resources
from sweeps.jobs.job import KILLED, REQUEUE, Job
from sweeps.jobs.sweep_folder import JobBatch, Sweep, python_path
from sweeps.planning.planned_runs import PlannedRun


def start(
    sweep: Sweep, runs: Sequence[PlannedRun], resources: Resources, batch: JobBatch
) -> dict[str, str]:
    """Start a pool that outlives this process; return ids by run, or `SweepError` if too small."""
    each = resources.gpu_count
    gpus = visible_gpus() if each else []
    gpus.sort(key=_busy(sweep).__contains__)  # a search has a pool for each of its trials
    if each and len(gpus) < resources.workers * each:
        most = len(gpus) // each
        raise SweepError(
            f"cluster.workers={resources.workers} with cluster.gpus={resources.gpus} needs "
            f"{resources.workers * each} GPUs, {len(gpus)} are visible; "
            f"try {f'cluster.workers={most}' if most else f'cluster.gpus={len(gpus)}'}"
        )
    folder, code = sweep.pools / batch.name, sweep.snapshots / batch.code
    folder.mkdir(parents=True)
    files = {run.name: str(folder / f"{run.name}.json") for run in runs}
    for run in runs:
        atomic_write(files[run.name], json.dumps(Job.of(sweep, run, batch).__dict__))
    share = [gpus[i * each : (i + 1) * each] if each else None for i in range(resources.workers)]
    values = {"jobs": files, "workers": share, "logs": str(sweep.logs)}
    atomic_write(folder / "pool.json", json.dumps(values))
    environment = environment_of_jobs() | {"PYTHONPATH": python_path(code)}
    # Side by side the runs share the cores; `train.threads` and OMP_NUM_THREADS say otherwise.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (cores or 1) // resources.workers)))
    with (folder / "pool.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "sweeps.jobs.pool", str(folder)], cwd=code, env=environment,
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    state, looks = folder / "state.json", 3000  # a minute
    while process.poll() is None and not state.is_file() and (looks := looks - 1):
        time.sleep(0.02)
    if not state.is_file():
        process.terminate()  # its runs would be nobody's
        raise SweepError(f"the pool did not start; see {folder / 'pool.log'}")
    process.returncode = 0  # it outlives this command on purpose: no warning about that
    return {run.name: f"{batch.name}/{run.name}" for run in runs}


def _busy(sweep: Sweep) -> set[str]:
    """Return the GPUs that the sweep's live pools have given to runs."""
    live = [folder for folder in sweep.path.glob("pools/*") if is_locked(folder)]
    shares = [run_folder.read(folder / "state.json").get("gpus", []) for folder in live]
    return {str(gpu) for share in shares for gpu in share}


def states(sweep: Sweep, batch: str) -> dict[str, str]:
    """Return PENDING, RUNNING or ENDED of a pool's runs, by run; if it is gone, what goes on."""
    folder = sweep.pools / batch
    known = run_folder.read(folder / "state.json").get("runs", {})
    if is_locked(folder):
        return {run: str(state) for run, state in known.items()}
    return dict.fromkeys(_orphans(folder) if "RUNNING" in known.values() else (), "RUNNING")


def _orphans(folder: Path) -> dict[str, psutil.Process]:
    """Return the workers that a killed pool has left, by run; they know nothing of its end."""
    # A data worker that was forked has the words of its worker, and a higher number.
    every = sorted(psutil.process_iter(["cmdline"]), key=lambda one: one.pid, reverse=True)
    files = [(Path((one.info["cmdline"] or [""])[-1]), one) for one in every]
    return {file.stem: one for file, one in files if file.parent == folder}


def cancel(sweep: Sweep, batch: str, run: str) -> None:
    """Take a run out of a pool: if it waits, it leaves its queue; if it runs, it gets TERM."""
    folder = sweep.pools / batch
    if is_locked(folder):
        atomic_write(folder / f"{run}.cancel", "")
    elif run in (left := _orphans(folder)):
        left[run].terminate()


class Pool:
    """The queue and its workers, inside the pool's own process."""

    def __init__(self, folder: Path) -> None:
        values = run_folder.read(folder / "pool.json")
        self.folder = folder
        self.jobs: dict[str, str] = values["jobs"]
        self.logs = Path(values["logs"])
        self.idle: list[list[str] | None] = values["workers"]  # GPUs of each worker without a run
        self.queue = list(self.jobs)
        self.live: dict[str, tuple[subprocess.Popen[bytes], list[str] | None]] = {}
        self.ended: set[str] = set()
        self.stopping = False

    def state(self) -> str:
        """Return who runs and who waits, as it is written."""
        found = dict.fromkeys(self.ended, "ENDED") | dict.fromkeys(self.queue, "PENDING")
        found |= dict.fromkeys(self.live, "RUNNING")
        taken = [gpu for _, gpus in self.live.values() for gpu in gpus or ()]
        return json.dumps({"pid": os.getpid(), "runs": found, "gpus": taken})

    def run(self) -> None:
        """Work until the queue is empty or TERM has come."""
        # A handler may come anywhere: the flag is read by the loop.
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stopping", True))
        written, tries = "", 100  # of the last write, where the disk stays full
        while self.queue or self.live or (self.state() != written and tries):
            tries -= not (self.queue or self.live)
            # On a full disk nothing starts; what runs has its pool all the same.
            with contextlib.suppress(OSError):
                self._cancel()
                self._collect()
                if self.state() == written:
                    self._fill()
                if (state := self.state()) != written:
                    atomic_write(self.folder / "state.json", state)
                    written = state
            time.sleep(0.1)

    def _cancel(self) -> None:
        cancelled = [path.stem for path in self.folder.glob("[!.]*.cancel")]  # whole files
        for run in self.jobs if self.stopping else cancelled:
            (self.folder / f"{run}.cancel").unlink(missing_ok=True)
            if run in self.queue:
                self.queue.remove(run)
            elif run in self.live and run not in self.ended:
                self.live[run][0].send_signal(signal.SIGTERM)
            self.ended.add(run)

    def _collect(self) -> None:
        """Take in the runs that ended; one that asks for a requeue waits behind the others."""
        for run in [run for run, (process, _) in self.live.items() if process.poll() is not None]:
            process, gpus = self.live.pop(run)
            self.idle.append(gpus)
            if run in self.ended:  # as it was told
                continue
            if process.returncode == REQUEUE:
                self.queue.append(run)
                continue
            self.ended.add(run)
            if process.returncode == -9:
                # SIGKILL: it could leave no word itself.
                Job(**run_folder.read(self.jobs[run])).note_end("failed", rank=0, error=KILLED)

    def _fill(self) -> None:
        while self.queue and self.idle:
            run, gpus = self.queue[0], self.idle[0]
            environment = environment_of_jobs()
            if gpus is not None:
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
            self.logs.mkdir(parents=True, exist_ok=True)
            log = str(self.logs / f"{self.folder.name}_{run}")
            with open(f"{log}.out", "ab") as out, open(f"{log}.err", "ab") as err:
                process = subprocess.Popen(
                    [sys.executable, "-u", "-m", "sweeps.jobs.job", self.jobs[run]],
                    env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                )  # fmt: skip
            del self.queue[0], self.idle[0]
            self.live[run] = process, gpus


if __name__ == "__main__":  # the pool of the folder on the command line
    with locked(Path(sys.argv[1]), wait_s=1.0):
        Pool(Path(sys.argv[1])).run()
