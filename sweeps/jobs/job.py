"""One run inside its job: attempts noted, USR2 answered by a requeue, failures left visible.

On USR2 (pre-emption, time limit) training saves at a step boundary; rank 0 then requeues this very
job and every rank waits to be ended, because a rank that leaves early would end the others before
they have saved. On TERM Slurm has decided already (cancelled, or pre-empted without a warning
signal): save and wait. Before training listens (imports, data) and in commands that save nothing, a
signal unwinds at once. What fails raises, so that Slurm says FAILED and the log holds the
traceback.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from experiments.runtime import run_folder, signals
from experiments.runtime.command import EXIT_CODES, ROOT, Interrupted, choose_spinning
from experiments.runtime.files import atomic_write
from experiments.runtime.process_group import process_group
from routing.errors import UserError
from sweeps import SweepError
from sweeps.jobs.sweep_folder import JobBatch, Sweep, python_path
from sweeps.planning.planned_runs import PlannedRun

FRUITLESS = 3  # attempts that start from the same step before a run is given up
# Exit codes: a local worker asks for a place at the end of the queue (EX_TEMPFAIL) ...
REQUEUE = 75
STOPPED = 76  # ... or has saved and stopped because it was told to
# What a run that SIGKILL ended cannot say itself.
KILLED = "killed by signal 9 (out of memory?)"


@dataclass(frozen=True)
class Job:
    """What is submitted: plain values, so a requeued job needs nothing but this and the disk."""

    run: dict[str, Any]
    root: str
    sweep: str
    cwd: str
    code: str | None  # the snapshot, or None to run the code as it is
    batch: str = ""
    kind: str = "slurm"
    signal_s: int = 180

    @classmethod
    def of(cls, sweep: Sweep, run: PlannedRun, batch: JobBatch) -> Job:
        """Return the job of one of a sweep's runs, for the folder that this process is in."""
        code = str(sweep.snapshots / batch.code) if batch.code else None
        return cls(
            run.__dict__, str(sweep.root), sweep.name, os.getcwd(), code, batch.name, batch.kind,
            batch.resources["signal_s"],
        )  # fmt: skip

    @property
    def id(self) -> str | None:
        """The id that `scontrol requeue` needs for this process's job; None outside Slurm.

        The raw job id is wrong for the one task of an array whose raw id equals the array's: it
        means them all.
        """
        if self.kind != "slurm":
            return None
        array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
        return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")

    @property
    def folder(self) -> Sweep:
        """The folder of the sweep that it belongs to."""
        return Sweep(Path(self.root), self.sweep)

    def checkpoint(self) -> Any:
        """Answer a signal that comes before this job listens: there is nothing to save yet."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)

    def note_end(self, how: str, **values: Any) -> None:
        """Note how this start ended, with the step that is saved."""
        run = PlannedRun(**self.run)
        self.folder.note(run.name, "end", how=how, step=run.saved_step, job=self.id, **values)

    def check_progress(self, step: int) -> None:
        """Raise `SweepError` if this submission began at `step` often enough already."""
        events = self.folder.events(self.run["name"])
        starts = [e for e in events if e["event"] == "start" and e.get("batch") == self.batch]
        if len(starts) >= FRUITLESS and all(e.get("step") == step for e in starts[-FRUITLESS:]):
            raise SweepError(
                f"given up: {FRUITLESS} attempts started at step {step} and none saved a later "
                "one; see what ends them, then python -m sweeps retry"
            )

    def __call__(self) -> None:
        """Run it (submitit calls this in every task): note the attempt, answer signals.

        Raises:
            SweepError: It returned another code than 0, runs other code than was submitted, or this
                would be the fourth start from the same step.
        """
        run = PlannedRun(**self.run)
        rank = export_ranks() if self.id else process_group().rank
        step, parent_step = run.saved_step, run.parent_step
        with _failures(self, rank):
            if self.code is not None:
                check_code(Path(self.code))
            os.chdir(self.cwd)
            if rank == 0:
                self.check_progress(step)
                self.folder.note(
                    run.name, "start", step=step, job=self.id, pid=os.getpid(),
                    code=self.code and Path(self.code).name, host=host(), batch=self.batch,
                    restart=int(os.environ.get("SLURM_RESTART_COUNT", 0)),
                )  # fmt: skip
            with _watchdog(self, run, rank):
                asked = _call(run)
        if asked is not None:
            _interrupted(self, run, rank, asked)
        if rank == 0:
            if not run.trains:
                self.folder.mark_done(run.name, parent_step)
            self.note_end("done")


@contextlib.contextmanager
def _failures(job: Job, rank: int) -> Iterator[None]:
    """Note an exception with its place before it goes on to Slurm."""
    try:
        yield
    except KeyboardInterrupt:
        job.note_end("stopped", rank=rank)
        raise
    except Exception as error:
        own = isinstance(error, UserError)
        text = str(error) if own else f"{type(error).__name__}: {error}"
        job.note_end("failed", rank=rank, error=text[:2000], where="" if own else place(error))
        raise


def _call(run: PlannedRun) -> str | None:
    """Call the entry point; return the signal that interrupted it, None if it is done."""
    choose_spinning()
    module, _, name = run.entry.partition(":")
    try:
        with _early():
            code = getattr(importlib.import_module(module), name)(run.args)
    except SystemExit as exit_:
        code = exit_.code
    except Interrupted as error:
        return error.reason
    for reason, number in EXIT_CODES.items():
        if code == number:
            return reason
    if code not in (0, None):
        status = run_folder.read(Path(run.folder) / "status.json") if run.folder else {}
        why = status.get("error") or "see the lines above in this log"
        raise SweepError(f"{run.entry} returned {code}: {why}")
    if run.trains and not run.finished:
        raise SweepError(
            f"{run.entry} returned, but {run.folder} holds no finished run of {run.steps} steps"
        )
    return None


@contextlib.contextmanager
def _early() -> Iterator[None]:
    """Unwind on USR2 and TERM until training puts its own handlers in their place."""

    def unwind(number: int, _frame: FrameType | None) -> None:
        # A forked data worker inherits the handler and gets the signal too.
        if os.getpid() == owner:
            raise SystemExit(EXIT_CODES[signal.Signals(number).name])

    owner, kept = os.getpid(), {}
    for name in ("SIGUSR2", "SIGTERM"):
        # Windows has no USR2, and handlers belong to the main thread.
        with contextlib.suppress(AttributeError, ValueError):
            number = getattr(signal, name)
            kept[number] = signal.signal(number, unwind)
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _watchdog(job: Job, run: PlannedRun, rank: int) -> Iterator[None]:
    """Requeue from the last checkpoint if USR2 is not answered in time (in a long evaluation)."""
    over = threading.Event()

    def watch() -> None:
        since = None
        while not over.wait(0.5):
            if "USR" not in (signals.requested() or ""):
                since = None
            elif since is None:
                since = time.monotonic()
            elif time.monotonic() - since > 0.7 * job.signal_s:
                job.note_end("requeued", signal="USR2, not answered in time")
                with contextlib.suppress(SweepError):
                    if not _requeue(job):
                        os._exit(REQUEUE)
                return

    if rank == 0 and job.id is not None and run.trains:
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _interrupted(job: Job, run: PlannedRun, rank: int, asked: str) -> NoReturn:
    """Requeue, or wait for what Slurm has decided; what can be saved is saved on every rank."""
    step, requeue = run.saved_step, "USR" in asked
    if rank == 0:
        # Given up here already rather than after another wait in the queue.
        if requeue:
            with _failures(job, rank):
                job.check_progress(step)
        job.note_end("requeued" if requeue else "stopped", signal=asked)
    if job.id is None:
        raise SystemExit(REQUEUE if requeue else STOPPED)
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: ended.append(number))
    if requeue and rank == 0:
        print(f"saved step {step}; requeueing {job.id}", flush=True)
        with _failures(job, rank):
            if not _requeue(job):
                raise SystemExit(REQUEUE)
    over = time.monotonic() + 900.0
    while not ended and time.monotonic() < over:  # Slurm's TERM; its KILL would come later
        time.sleep(0.1)
    raise SystemExit(128 + signal.SIGTERM)


def _requeue(job: Job) -> bool:
    """Requeue the job, or leave that to its script: return False then, which waits for our end."""
    if shutil.which("scontrol") is None:  # in a container: the job's script, outside, looks for it
        atomic_write(job.folder.logs / f"{job.id}.requeue", "")
        return False
    words = ["scontrol", "requeue", str(job.id)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        reason = " ".join(done.stderr.split())
        raise SweepError(f"scontrol requeue {job.id}: {reason}; python -m sweeps retry goes on")
    return True


# --- the process: its code, its node, its rank ----------------------------------------------------


def check_code(code: Path) -> None:
    """Make sure that children run the snapshot; raise `SweepError` if this process does not."""
    if code.resolve() != ROOT:
        raise SweepError(
            f"the job imported sweeps from {ROOT}, not from its snapshot {code}: "
            "PYTHONPATH or a .pth file of this environment comes first"
        )
    os.environ["PYTHONPATH"] = python_path(code)
    if str(code) not in sys.path:
        sys.path.insert(0, str(code))


def place(error: BaseException) -> str:
    """Return `file:line` of the innermost frame that is neither of this package nor installed."""
    frames = [(Path(f.filename), f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    own = ROOT / "sweeps"
    theirs = [f for f in frames if "site-packages" in f[0].parts or f[0].is_relative_to(own)]
    for path, line in [f for f in frames if f not in theirs][-1:] or frames[-1:]:
        return f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name}:{line}"
    return ""


def host() -> str:
    """Return the node's name as Slurm calls it (several nodes may share a host name)."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def export_ranks() -> int:
    """Give torch.distributed its variables in a job of several tasks; return the rank."""
    if int(os.environ.get("SLURM_NTASKS", 1)) == 1:
        return 0
    import submitit

    # Another port after a requeue: the old one may linger.
    seed = f"{os.environ['SLURM_JOB_ID']}.{os.environ.get('SLURM_RESTART_COUNT', 0)}"
    os.environ["MASTER_PORT"] = str(random.Random(seed).randint(20000, 30000))
    distributed = submitit.helpers.TorchDistributedEnvironment()
    return int(distributed.export(set_cuda_visible_devices=False, overwrite=True).rank)


if __name__ == "__main__":  # `python -m sweeps.jobs.job FILE` is what a local worker starts
    Job(**json.loads(Path(sys.argv[1]).read_text()))()
