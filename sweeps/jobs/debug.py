"""`cluster=debug`: the runs of a submission in this process, one after the other."""

import contextlib
import sys
import traceback
from collections.abc import Callable, Sequence

from routing.errors import UserError
from sweeps.jobs.job import REQUEUE, STOPPED, Job
from sweeps.plan.dependencies import is_parent_done
from sweeps.store.folder import JobBatch, Sweep
from sweeps.store.planned_run import PlannedRun


def run_here(
    sweep: Sweep, runs: Sequence[PlannedRun], batch: JobBatch, say: Callable[[str], None]
) -> list[PlannedRun]:
    """Run a `debug` batch, one run after the other; return those that failed.

    Raises:
        SystemExit: A run was asked to stop.
    """
    failed: list[PlannedRun] = []
    if batch.kind != "debug":
        return failed
    for number, run in enumerate(runs, 1):
        say(f"--- {number}/{len(runs)}  {run.name}  {run.label}")
        if not is_parent_done(sweep, run):
            say("skipped: the run that it starts from has not finished")
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
                sys.stderr.write(f"error: {error}\n" if isinstance(error, UserError) else text)
            failed.append(run)
    if failed:
        say(f"{len(failed)} of {len(runs)} failed")
    return failed
