"""Pools on this machine: start one, read the states of its runs, cancel a run.

A pool is one process (`sweeps.jobs.pool_process`) that outlives the shell that started it. Its lock
shows whether it is alive.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from experiments.runtime import run_folder
from experiments.runtime.files import atomic_write
from experiments.runtime.locks import is_locked
from sweeps import NothingSubmitted
from sweeps.jobs.job import Job
from sweeps.jobs.pool_gpus import choose_gpus
from sweeps.jobs.snapshot import job_environment
from sweeps.store.folder import JobBatch, Sweep
from sweeps.store.planned_run import PlannedRun
from sweeps.store.resource_options import Resources


def start(
    sweep: Sweep, runs: Sequence[PlannedRun], workers: int, by_run: Mapping[str, Resources],
    batch: JobBatch, live_jobs: Mapping[str, str],
) -> dict[str, str]:  # fmt: skip
    """Start a pool that outlives this process; return ids by run.

    Of the resources `by_run` only GPUs count here. `live_jobs` are the ids, by run, of runs in
    other pools that some of these wait for.

    Raises:
        NothingSubmitted: It did not start, or there are too few GPUs.
    """
    gpus = choose_gpus(sweep, workers, [by_run[run.name] for run in runs])
    folder, launch = sweep.pools / batch.name, sweep.launches / batch.launch
    code = launch / "code"
    folder.mkdir(parents=True)
    needs = {}
    for run in runs:
        needs[run.name] = (by_run[run.name].gpu_count, by_run[run.name].runs_per_gpu)
    elsewhere = {run: job.partition("/")[0] for run, job in live_jobs.items()}
    jobs = [Job.create(sweep, run, batch) for run in runs]
    write_jobs(
        launch / batch.name, jobs, workers=workers, gpus=gpus, needs=needs, elsewhere=elsewhere
    )
    environment = job_environment(code)
    # The runs share the cores; `train.threads` or OMP_NUM_THREADS override this.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (cores or 1) // workers)))
    with (folder / "pool.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "sweeps.jobs.pool_process", str(launch / batch.name)],
            cwd=code, env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    state = folder / "state.json"
    for _ in range(3000):  # a minute
        if process.poll() is not None or state.is_file():
            break
        time.sleep(0.02)
    if not state.is_file():
        process.terminate()  # avoid orphaned runs
        raise NothingSubmitted(f"the pool did not start; see {folder / 'pool.log'}")
    process.returncode = 0  # it outlives this command: without this, Popen warns
    return {run.name: f"{batch.name}/{run.name}" for run in runs}


def running_pools(root: Path) -> list[str]:
    """Return the grids of the pools on this machine; with their folder of runs, if not `root`."""
    names = {}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if words[-3:-1] == ["-m", "sweeps.jobs.pool_process"]:
            folder = Path(words[-1])  # RUNS/.sweeps/GRID/launches/ID/BATCH
            grid, pool_root = folder.parents[2].name, folder.parents[4]
            names[folder] = grid if pool_root == root else f"{grid} in {pool_root}"
    return list(names.values())


def write_jobs(folder: Path, jobs: Sequence[Job], workers: int, **values: Any) -> None:
    """Write the files that a pool reads as it starts: one for each job, and pool.json.

    The folder is in that of their launch, and has the name of the pool.
    """
    files = {}
    for job in jobs:
        name = job.run["name"]
        files[name] = str(folder / f"{name}.json")
        atomic_write(files[name], json.dumps(job.__dict__))
    first = jobs[0]
    places = {
        "root": first.root,
        "sweep": first.sweep,
        "logs": str(first.folder.logs / first.batch),
    }
    content = {"jobs": files, "workers": workers, **places, **values}
    atomic_write(folder / "pool.json", json.dumps(content))


def states(sweep: Sweep, batch: str) -> dict[str, str]:
    """Return PENDING, RUNNING or ENDED by run; if the pool is gone, its runs that still run."""
    folder = sweep.pools / batch
    runs = run_folder.read(folder / "state.json").get("runs", {})
    if is_locked(folder):
        return {run: str(state) for run, state in runs.items()}
    orphans = _orphans(sweep, batch) if "RUNNING" in runs.values() else ()
    return dict.fromkeys(orphans, "RUNNING")


def is_alive(sweep: Sweep, batch: str) -> bool:
    """Return whether a pool, or a run that it started, still runs."""
    return is_locked(sweep.pools / batch) or bool(_orphans(sweep, batch))


def has_left_task(sweep: Sweep, batch: JobBatch, run: str, is_running: bool) -> bool:
    """Return whether a run has ended, or was cancelled, before the Slurm task that it shares."""
    if batch.runs_per_task == 1:
        return False
    folder = sweep.pools / batch.task_name(run)
    if not is_running and (folder / f"{run}.cancel").exists():
        return True
    states_of_task = run_folder.read(folder / "state.json").get("runs", {})
    return isinstance(states_of_task, dict) and states_of_task.get(run) == "ENDED"


def cancel_in_task(sweep: Sweep, batch: JobBatch, run: str) -> None:
    """Remove one run from a Slurm task that others share, as `cancel` does from a pool."""
    folder = sweep.pools / batch.task_name(run)
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / f"{run}.cancel", "")


def _orphans(sweep: Sweep, batch: str) -> dict[str, psutil.Process]:
    """Return the worker processes that a killed pool left running, by run."""
    processes = list(psutil.process_iter(["cmdline"]))
    # A forked data worker has the command line of its worker, and a higher number.
    processes.sort(key=lambda process: process.pid, reverse=True)
    workers = {}
    for process in processes:
        words = process.info["cmdline"] or []
        file = Path(words[-1]) if words[-3:-1] == ["-m", "sweeps.jobs.job"] else Path()
        if file.parent.name == batch and file.parent.parent.parent == sweep.launches:
            workers[file.stem] = process
    return workers


def cancel(sweep: Sweep, batch: str, run: str) -> None:
    """Remove a run from a pool: a waiting one leaves the queue, a running one gets TERM."""
    folder = sweep.pools / batch
    if is_locked(folder):
        atomic_write(folder / f"{run}.cancel", "")
        return
    worker = _orphans(sweep, batch).get(run)
    if worker is not None:
        worker.terminate()
