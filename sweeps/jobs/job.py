"""One run inside its job: attempts noted, signals answered, failures left visible.

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
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from routing.errors import UserError
from sweeps.jobs import run_folder, slurm
from sweeps.jobs.job_process import RunFailed, check_code, export_ranks, host, place
from sweeps.jobs.sweep_folder import FRUITLESS, Attempts, Sweep
from sweeps.planning.plan import Run

REQUEUE = (
    75  # exit code by which a local worker asks for its place at the end of the queue (EX_TEMPFAIL)
)
STOPPED = 76  # exit code of a run that saved and stopped because it was told to


class Early(BaseException):
    """A signal that came while nothing could be saved."""


class GivenUp(RuntimeError):
    """A run started from the same step too often."""


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

    @property
    def id(self) -> str | None:
        """The id that Slurm's commands take for this job; None in a pool."""
        return slurm.own_id() if self.kind == "slurm" else None

    def __call__(self) -> dict[str, Any]:
        """Run it (submitit calls this in every task of the job)."""
        if self.code is not None:
            check_code(Path(self.code))
        os.chdir(self.cwd)
        return execute(self)

    def checkpoint(self) -> Any:
        """Answer a signal that comes before this job listens: there is nothing to save yet."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)

    @property
    def attempts(self) -> Attempts:
        """The record of this run's starts and ends."""
        return Sweep(Path(self.root), self.sweep).attempts(self.run["name"])


def execute(job: Job) -> dict[str, Any]:
    """Run a job in this process: note the attempt, call the entry, answer signals.

    Raises:
        GivenUp: This would be the fourth start from the same step.
        RunFailed: The command returned another code than 0.
    """
    run, attempts = Run.from_dict(job.run), job.attempts
    rank = export_ranks() if job.id else int(os.environ.get("RANK", 0))
    step = saved_step(run)
    with _failures(job, run, rank):
        if rank == 0:
            _guard(attempts, step)
            attempts.note(
                "start", step=step, job=job.id, pid=os.getpid(),
                code=Path(job.code).name if job.code else None, host=host(), batch=job.batch,
                restart=int(os.environ.get("SLURM_RESTART_COUNT", 0)),
            )  # fmt: skip
        with _watchdog(job, run, rank):
            asked = _call(run)
    if asked is not None:
        return _interrupted(job, run, rank, asked)
    if rank == 0:
        if not run.trains:
            _mark_done(job, run)
        attempts.note("end", how="done", step=saved_step(run))
    return {"run": run.name, "how": "done"}


def saved_step(run: Run) -> int:
    """Return the step that survives a kill now; 0 for a command that saves nothing."""
    return run_folder.saved_step(run.folder) if run.trains else 0


def _guard(attempts: Attempts, step: int) -> None:
    if attempts.fruitless(step) >= FRUITLESS:
        raise GivenUp(
            f"given up: {FRUITLESS} attempts started at step {step} and none saved a later one; "
            f"see what ends them, then python -m sweeps retry"
        )


@contextlib.contextmanager
def _failures(job: Job, run: Run, rank: int) -> Iterator[None]:
    """Note an exception with its place before it goes on to Slurm."""
    try:
        yield
    except KeyboardInterrupt:
        job.attempts.note("end", how="stopped", rank=rank, step=saved_step(run))
        raise
    except Exception as error:
        own = isinstance(error, GivenUp | RunFailed | UserError)
        text = str(error) if own else f"{type(error).__name__}: {error}"
        job.attempts.note(
            "end", how="given up" if isinstance(error, GivenUp) else "failed", rank=rank,
            job=job.id, step=saved_step(run), error=text[:2000], where="" if own else place(error),
        )  # fmt: skip
        raise


def _call(run: Run) -> str | None:
    """Call the entry point; return the signal that interrupted it, None if it is done.

    Raises:
        RunFailed: It returned another code than 0, or left no finished run.
    """
    from experiments.runtime.command import EXIT_CODES, Interrupted, choose_spinning

    choose_spinning()
    module, _, name = run.entry.partition(":")
    try:
        with _early():
            code = getattr(importlib.import_module(module), name)(list(run.args))
    except SystemExit as exit_:
        code = exit_.code
    except Interrupted as error:
        return error.reason
    except Early as error:
        return str(error)
    for reason, number in EXIT_CODES.items():
        if code == number and run.trains:
            return reason
    if code not in (0, None):
        raise RunFailed(f"{run.entry} returned {code}: {_why(run)}")
    if run.trains and not run_folder.finished(run.folder, run.steps):
        raise RunFailed(
            f"{run.entry} returned, but {run.folder} holds no finished run of {run.steps} steps"
        )
    return None


@contextlib.contextmanager
def _early() -> Iterator[None]:
    """Unwind on USR2 and TERM until training puts its own handlers in their place."""

    def unwind(number: int, _frame: FrameType | None) -> None:
        if (
            os.getpid() == owner
        ):  # a forked data worker inherits the handler and gets the signal too
            raise Early(signal.Signals(number).name)

    owner, kept = os.getpid(), {}
    for number in (signal.SIGUSR2, signal.SIGTERM):
        with contextlib.suppress(ValueError):  # handlers belong to the main thread
            kept[number] = signal.signal(number, unwind)
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _watchdog(job: Job, run: Run, rank: int) -> Iterator[None]:
    """Requeue from the last checkpoint if USR2 is not answered in time (in a long evaluation)."""
    over = threading.Event()

    def watch() -> None:
        from experiments.runtime import signals

        since = None
        while not over.wait(0.5):
            if "USR" not in (signals.requested() or ""):
                since = None
            elif since is None:
                since = time.monotonic()
            elif time.monotonic() - since > 0.7 * job.signal_s:
                job.attempts.note(
                    "end",
                    how="requeued",
                    step=saved_step(run),
                    job=job.id,
                    signal="USR2, not answered in time",
                )
                subprocess.run(["scontrol", "requeue", str(job.id)], timeout=120, check=False)
                return

    if rank == 0 and job.id is not None and run.trains:
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _why(run: Run) -> str:
    error = run_folder.read(Path(run.folder) / "status.json").get("error") if run.folder else None
    return str(error or "see the lines above in this log")


def _interrupted(job: Job, run: Run, rank: int, asked: str) -> dict[str, Any]:
    """Requeue, or wait for what Slurm has decided; what can be saved is saved on every rank."""
    attempts, step, requeue = job.attempts, saved_step(run), "USR" in asked
    if rank == 0:
        # Given up here already rather than after another wait in the queue.
        if requeue:
            with _failures(job, run, rank):
                _guard(attempts, step)
        attempts.note(
            "end", how="requeued" if requeue else "stopped", step=step, signal=asked, job=job.id
        )
    if job.id is None:
        raise SystemExit(REQUEUE if requeue else STOPPED)
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: ended.append(number))
    if requeue and rank == 0:
        print(f"saved step {step}; requeueing {job.id}", flush=True)
        with _failures(job, run, rank):
            _requeue(job.id)
    _wait(ended, 900.0)
    raise SystemExit(128 + signal.SIGTERM)


def _requeue(job_id: str) -> None:
    done = subprocess.run(
        ["scontrol", "requeue", job_id], capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode:
        reason = " ".join(done.stderr.split())
        raise RunFailed(f"scontrol requeue {job_id}: {reason}; launch the sweep again to go on")


def _wait(ended: list[int], seconds: float) -> None:
    """Sleep until Slurm's TERM (its KILL would come later)."""
    end = time.monotonic() + seconds
    while not ended and time.monotonic() < end:
        time.sleep(0.1)


def _mark_done(job: Job, run: Run) -> None:
    from experiments.runtime.files import atomic_write

    path = done_mark(Path(job.root), job.sweep, run.name)
    atomic_write(path, json.dumps({"run": run.name, "time": time.time()}))


def done_mark(root: Path, sweep: str, name: str) -> Path:
    """Return the file that says that a command which is no training run has ended well."""
    return Sweep(root, sweep).path / "done" / f"{name}.json"


def main(words: list[str] | None = None) -> int:
    """Run the job in a JSON file: `python -m sweeps.jobs.job FILE` (what a local worker starts)."""
    (path,) = sys.argv[1:] if words is None else words
    job = Job(**json.loads(Path(path).read_text()))
    job()
    return 0


if __name__ == "__main__":
    sys.exit(main())
