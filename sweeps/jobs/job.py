"""One run inside its job: it records attempts, requeues itself on USR2 and reports failures.

On USR2 (pre-emption, time limit) training saves at a step boundary; rank 0 then requeues this job
and every rank waits to be ended, because a rank that leaves early would end the others before they
have saved. On TERM Slurm has decided already (cancelled, or pre-empted without a warning signal):
save and wait. Before training installs its handlers (imports, data), and in commands that save
nothing, a signal unwinds at once. A failure raises, so that Slurm reports FAILED and the log has
the traceback.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from experiments.runtime import run_folder, signals
from experiments.runtime.command import EXIT_CODES, Interrupted, choose_spinning
from experiments.runtime.errors import print_error
from routing.errors import UserError, require
from sweeps import SweepError
from sweeps.jobs.job_process import (
    check_code,
    error_place,
    expect_term,
    host,
    job_rank,
    requeue,
    wait_for_end,
)
from sweeps.plan.dependencies import is_parent_done, resolve
from sweeps.store.folder import JobBatch, Sweep
from sweeps.store.planned_run import PlannedRun

MAX_FRUITLESS_STARTS = 3  # attempts from the same step before a run is given up
# Exit codes of a worker on this machine: it asks to be queued again (EX_TEMPFAIL), ...
REQUEUE = 75
STOPPED = 76  # ... or it has saved and stopped as it was asked to
# Names of the signals that ask for a save and a requeue; Windows has no such `signal.Signals`.
REQUEUE_SIGNALS = ("SIGUSR1", "SIGUSR2")


@dataclass(frozen=True)
class Job:
    """What is submitted: plain values, so that a requeued job needs only these and the disk.

    Attributes:
        run: Fields of its `PlannedRun`.
        root: Folder of the run folders.
        sweep: Name of its sweep.
        cwd: Folder that the launch was in.
        code: Its copy of the code, or None to run the code as it is.
        version: Hash of that copy.
        batch: Name of its submission.
        kind: slurm, local or debug.
        signal_s: How long before its time limit it gets USR2.
        shared: Whether it is one of several runs in a task of Slurm, which requeues itself.
    """

    run: dict[str, Any]
    root: str
    sweep: str
    cwd: str
    code: str | None
    version: str | None = None
    batch: str = ""
    kind: str = "slurm"
    signal_s: int = 180
    shared: bool = False

    @classmethod
    def create(cls, sweep: Sweep, run: PlannedRun, batch: JobBatch) -> Job:
        """Return the job of one of a sweep's runs; it will run in the current folder."""
        return cls(
            run=run.__dict__,
            root=str(sweep.root),
            sweep=sweep.name,
            cwd=os.getcwd(),
            code=str(sweep.launches / batch.launch / "code") if batch.launch else None,
            version=batch.code or None,
            batch=batch.name,
            kind=batch.kind,
            signal_s=batch.resources["signal_s"],
            shared=batch.runs_per_task > 1,
        )

    @property
    def id(self) -> str | None:
        """The id that `scontrol requeue` needs for this process's job; None outside Slurm.

        The raw job id is wrong for the task of an array whose raw id equals the array's: it means
        all tasks.
        """
        if self.kind != "slurm":
            return None
        array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
        return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")

    @property
    def launch(self) -> Path:
        """Folder of its launch."""
        return Path(self.code or "").parent

    @property
    def folder(self) -> Sweep:
        """Folder of its sweep."""
        return Sweep(Path(self.root), self.sweep)

    def checkpoint(self) -> Any:
        """Answer submitit's signal handler, before this job installs its own: nothing to save."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)

    def note_end(self, how: str, **values: Any) -> None:
        """Note how this start ended, with the step that is saved."""
        run = self.folder.resolved(PlannedRun(**self.run))
        self.folder.note(run.name, "end", how=how, step=run.saved_step, job=self.id, **values)

    def check_progress(self, step: int) -> None:
        """Raise `SweepError` if this submission has started at `step` often enough already."""
        steps = []
        for event in self.folder.events(self.run["name"]):
            if event["event"] == "start" and event.get("batch") == self.batch:
                steps.append(event.get("step"))
        require(
            steps[-MAX_FRUITLESS_STARTS:] != [step] * MAX_FRUITLESS_STARTS,
            f"given up: {MAX_FRUITLESS_STARTS} attempts started at step {step} and none saved "
            "a later step; find the cause in its log, then launch the grid with --retry",
            SweepError,
        )

    def __call__(self) -> None:
        """Run it (submitit calls this in every task): note the attempt, answer signals.

        Raises:
            SweepError: It returned another code than 0, runs other code than was submitted, or
                this would be the fourth start from the same step.
        """
        rank = job_rank(on_slurm=self.id is not None)
        with _note_failures(self, rank):
            if self.code is not None:
                check_code(Path(self.code))
            os.chdir(self.cwd)
            wait_s = 60.0 if self.kind == "slurm" else 0.0
            run = resolve(self.folder, PlannedRun(**self.run), rank == 0, wait_s)
            step, parent_step = run.saved_step, run.parent_step
            if rank == 0:
                self.check_progress(step)
                self.folder.note(
                    run.name, "start", step=step, job=self.id, pid=os.getpid(),
                    code=self.version, host=host(), batch=self.batch,
                    restart=int(os.environ.get("SLURM_RESTART_COUNT", 0)),
                )  # fmt: skip
            with _watchdog(self, run, rank):
                signal_name = _call(run)
        if signal_name is not None:
            _end_interrupted(self, run, rank, signal_name)
        if rank == 0:
            if not run.trains:
                self.folder.mark_done(run.name, parent_step)
            self.note_end("done")


@contextlib.contextmanager
def _note_failures(job: Job, rank: int) -> Iterator[None]:
    """Note an exception, with its place in the code, and raise it again."""
    try:
        yield
    except KeyboardInterrupt:
        job.note_end("stopped", rank=rank)
        raise
    except Exception as error:
        if isinstance(error, UserError):
            text, where = str(error), ""
        else:
            text, where = f"{type(error).__name__}: {error}", error_place(error)
        job.note_end("failed", rank=rank, error=text[:2000], where=where)
        raise


def _call(run: PlannedRun) -> str | None:
    """Call the entry point; return the signal that interrupted it, None if it is done."""
    choose_spinning()
    module, _, name = run.entry.partition(":")
    try:
        with _unwind_on_signals():
            code = getattr(importlib.import_module(module), name)(run.args)
    except SystemExit as exit_:
        code = exit_.code
    except Interrupted as error:
        return error.reason
    for signal_name, number in EXIT_CODES.items():
        if code == number:
            return signal_name
    if code not in (0, None):
        status = run_folder.read(Path(run.folder) / "status.json") if run.folder else {}
        reason = status.get("error") or "see the lines above in this log"
        raise SweepError(f"{run.entry} returned {code}: {reason}")
    require(
        not run.trains or run.finished,
        f"{run.entry} returned, but {run.folder} holds no finished run of {run.steps} steps",
        SweepError,
    )
    return None


def _unwind_on_signals() -> contextlib.AbstractContextManager[None]:
    """Exit on USR2 and TERM until training installs its own handlers."""
    process = os.getpid()

    def unwind(number: int, _frame: FrameType | None) -> None:
        # A forked data worker inherits the handler and gets the signal too.
        if os.getpid() == process:
            raise SystemExit(EXIT_CODES[signal.Signals(number).name])

    return signals.handled_by(unwind, ("SIGUSR2", "SIGTERM"))


@contextlib.contextmanager
def _watchdog(job: Job, run: PlannedRun, rank: int) -> Iterator[None]:
    """Requeue from the last checkpoint if USR2 is not answered in time (in a long evaluation)."""
    finished = threading.Event()

    def watch() -> None:
        requested_at = None
        while not finished.wait(0.5):
            if signals.STATE.reason not in REQUEUE_SIGNALS:
                requested_at = None
            elif requested_at is None:
                requested_at = time.monotonic()
            elif time.monotonic() - requested_at > 0.7 * job.signal_s:
                job.note_end("requeued", signal="USR2, not answered in time")
                with contextlib.suppress(SweepError):
                    if job.shared or not requeue(str(job.id), job.launch):
                        os._exit(REQUEUE)
                return

    if rank == 0 and job.id is not None and run.trains:
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        finished.set()


def _end_interrupted(job: Job, run: PlannedRun, rank: int, signal_name: str) -> NoReturn:
    """Requeue after USR2; after TERM wait for Slurm to end the job. Every rank has saved."""
    step, requested_requeue = run.saved_step, signal_name in REQUEUE_SIGNALS
    if rank == 0:
        # Give up now rather than after another wait in the queue.
        if requested_requeue:
            with _note_failures(job, rank):
                job.check_progress(step)
        job.note_end("requeued" if requested_requeue else "stopped", signal=signal_name)
    if job.id is None or job.shared:
        raise SystemExit(REQUEUE if requested_requeue else STOPPED)
    terminated = expect_term()
    if requested_requeue and rank == 0:
        print(f"saved step {step}; requeueing {job.id}", flush=True)
        with _note_failures(job, rank):
            if not requeue(job.id, job.launch):
                raise SystemExit(REQUEUE)
    wait_for_end(terminated)


def run_here(
    sweep: Sweep, runs: Sequence[PlannedRun], batch: JobBatch, say: Callable[[str], None]
) -> list[PlannedRun]:
    """Run a `debug` batch in this process, one run after the other; return those that failed.

    Raises:
        SystemExit: A run was asked to stop.
    """
    failed: list[PlannedRun] = []
    for number, run in enumerate(runs, 1):
        say(f"--- {number}/{len(runs)}  {run.name}  {run.label}")
        if not is_parent_done(sweep, run):
            say("skipped: the run that it starts from has not finished, or has diverged")
            continue
        try:
            Job.create(sweep, run, batch)()
        except SystemExit as exit_:
            if exit_.code in (REQUEUE, STOPPED):
                say("stopped; type the same command to resume")
                raise SystemExit(1) from None
            raise
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            sweep.logs.mkdir(parents=True, exist_ok=True)
            (sweep.logs / f"{batch.name}_{run.name}.err").write_text(text)
            # A user's error is a sentence here; its traceback is in the log.
            with contextlib.suppress(OSError):
                if isinstance(error, UserError):
                    print_error(error)
                else:
                    sys.stderr.write(text)
            failed.append(run)
    if failed:
        say(f"{len(failed)} of {len(runs)} failed")
    return failed


if __name__ == "__main__":  # `python -m sweeps.jobs.job FILE` is what a worker on this machine runs
    Job(**json.loads(Path(sys.argv[1]).read_text()))()
