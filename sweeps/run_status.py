"""Where every run stands: from its folder, the jobs' own records, and two Slurm calls."""

import contextlib
import functools
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil

from experiments.runtime import run_folder
from experiments.runtime.parsing import is_number
from sweeps import SweepError
from sweeps.jobs import pool, slurm
from sweeps.jobs.job import KILLED, host
from sweeps.jobs.sweep_folder import JobBatch, Sweep, all_sweeps
from sweeps.planning.planned_runs import PlannedRun

POOL = "waits for a worker"
LIVE = ("running", "starting", "requeued", "pending")
# In the order of the table, with their colours, legible on dark and on light: blue vanishes on
# black, yellow and cyan on white.
STATES = {
    "running": "green", "starting": "green", "failed": "bold red", "requeued": "magenta",
    "pending": "magenta", "stopped": "magenta", "new": "dim", "done": "",
}  # fmt: skip


@dataclass
class RunStatus:
    """One line of the status table."""

    run: PlannedRun
    state: str
    step: int | None = None
    steps: int | None = None
    speed: float | None = None
    eta: float | None = None
    job: str = ""
    node: str = ""
    attempts: int = 0
    why: str = ""
    beat: float | None = None  # seconds since the last heartbeat
    score: str = ""
    held: bool = False  # until somebody releases it
    sweep: str = ""  # another sweep, whose job it is
    elapsed: float = 0.0  # seconds that its starts have run so far
    trained: float = 0.0  # those of them spent on steps

    @property
    def live(self) -> bool:
        """Whether a job for it is in a queue or running."""
        return self.state in LIVE


Jobs = dict[str, slurm.QueueJob]
Queue = Callable[[str], tuple[Jobs, str]]


def slurm_queue(slurm_cluster: str) -> tuple[Jobs, str]:
    """Return a cluster's queued jobs by id, and why they are not known ("" if they are)."""
    try:
        return slurm.queue(slurm_cluster), ""
    except SweepError as error:
        return {}, str(error)


def statuses(
    sweep: Sweep, runs: Iterable[PlannedRun] | None = None, queue: Queue | None = None
) -> tuple[list[RunStatus], str]:
    """Return where runs are, and what is wrong with the scheduler ("" if nothing).

    A run that is no job of this sweep but one of another is where that one has it. `queue` is
    `slurm_queue` that asks once for several sweeps.
    """
    queue = queue or functools.cache(slurm_queue)
    latest = sweep.latest_batches()
    jobs, trouble = ask(sweep, latest, queue)
    known = sweep.runs()
    chosen = {run.name: run for run in (known.values() if runs is None else runs)}
    # All of them: how long the others take is what an estimate is made of.
    rows = {
        name: _status(sweep, run, latest.get(name), jobs.get(name), trouble)
        for name, run in (known | chosen).items()
    }
    for other in all_sweeps(sweep.root):
        left = {name for name, row in rows.items() if not row.live and row.state != "done"}
        theirs = other.latest_batches() if left and other.name != sweep.name else {}
        theirs = {name: theirs[name] for name in left & theirs.keys()}
        jobs, silent = ask(other, theirs, queue, history=False)
        trouble = trouble or silent
        for name, batch in theirs.items():
            if jobs[name].live:
                rows[name] = _status(other, rows[name].run, batch, jobs[name], silent)
                rows[name].sweep, rows[name].why = other.name, f"queued by sweep {other.name}"
    estimate(list(rows.values()), latest)
    shown = [row for name, row in rows.items() if name in chosen]
    return sorted(shown, key=lambda row: [*STATES].index(row.state)), trouble


def ask(
    sweep: Sweep, latest: Mapping[str, JobBatch], queue: Queue, history: bool = True
) -> tuple[Jobs, str]:
    """Ask Slurm (two calls per cluster) and the pools about the latest jobs of runs, by run."""
    batches = {batch.name: batch for batch in latest.values()}.values()
    pools = {b.name: pool.states(sweep, b.name) for b in batches if b.kind == "local"}
    jobs, trouble = {}, ""
    for run, batch in latest.items():
        if batch.kind != "slurm":
            state = pools[batch.name].get(run, "") if batch.kind == "local" else ""
            jobs[run] = slurm.QueueJob(batch.ids.get(run, ""), state, POOL)
    for cluster in sorted({b.slurm_cluster for b in batches if b.kind == "slurm"}):
        here = {
            run: batch
            for run, batch in latest.items()
            if batch.kind == "slurm" and batch.slurm_cluster == cluster
        }
        on_cluster, silent = _ask_cluster(sweep, cluster, here, queue, history)
        jobs |= on_cluster
        trouble = trouble or silent
    return jobs, trouble


def _ask_cluster(
    sweep: Sweep, cluster: str, latest: Mapping[str, JobBatch], queue: Queue, history: bool
) -> tuple[Jobs, str]:
    """Return the jobs of runs whose latest batches are on one cluster of Slurm, by run."""
    queued, trouble = queue(cluster)
    adopt(sweep, {batch.name: batch for batch in latest.values()}.values(), queued)
    ids = {run: batch.ids.get(run, "") for run, batch in latest.items()}
    gone = [job_id for job_id in ids.values() if job_id not in queued]
    ended = slurm.history(gone, cluster) if history and any(gone) and not trouble else {}
    jobs = {}
    for run, batch in latest.items():
        job = queued.get(ids[run])
        # Another job may bear the same id after a cluster was set up anew: the name tells.
        if job is None or job.name != batch.name:
            job = ended.get(ids[run], slurm.QueueJob(ids[run], ""))
        jobs[run] = job
    return jobs, trouble


def adopt(sweep: Sweep, batches: Iterable[JobBatch], queued: Jobs) -> None:
    """Give a batch whose submission was cut off the ids of the jobs that bear its name."""
    for batch in batches:
        if batch.kind != "slurm" or batch.ids:
            continue
        # An array is filled in the order of the batch's runs; what has ended may be gone.
        tasks = {i.partition("_")[2]: i for i, job in queued.items() if job.name == batch.name}
        places = {int(task or 0): job_id for task, job_id in tasks.items()}
        if ids := {run: places[n] for n, run in enumerate(batch.runs) if n in places}:
            batch.ids.update(ids)
            sweep.submitted(batch.name, ids, "found in the queue")


def _status(
    sweep: Sweep, run: PlannedRun, batch: JobBatch | None, job: slurm.QueueJob | None, trouble: str
) -> RunStatus:
    row = RunStatus(run, "new", steps=run.steps)
    events = sweep.events(run.name) if batch else []
    starts = [event for event in events if event["event"] == "start"]
    row.attempts, row.elapsed = len(starts), _spent(events, 0.0)
    if sweep.is_done(run):
        return _done(row)
    if batch is None or job is None:
        return row
    row.job, row.node = batch.ids.get(run.name, ""), job.node
    row.step = run.saved_step if run.trains else None
    # Those of an earlier submission may have been killed: what they said last is old.
    times = [e["time"] for e in starts if e.get("batch", batch.name) == batch.name]
    if job.running or (batch.kind == "debug" and _lives(events)):
        return _running(row, events, times)
    if job.live:
        row.state = "requeued" if row.attempts else "pending"
        row.why = job.reason.replace("None", "")
        if "held" in job.reason.lower():
            row.held = True
            release = " ".join(["scontrol", *slurm.on_cluster(batch.slurm_cluster), "release"])
            row.why = f"held ({job.reason}): {release} {job.id}"
        return row
    last = events[-1] if events else {}
    if last and not times:  # its job failed before its start, or the word is another's
        by_job = batch.kind == "slurm" and last["event"] != "cancelled"
        own = row.job and row.job == last.get("job") if by_job else last["time"] >= batch.time
        last = last if own else {}
    row.state, row.why = _ended(sweep, row, batch, last, events, job, trouble)
    return row


def _lives(events: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the process that started last, and has not ended, runs on this machine."""
    last = events[-1] if events else {}
    pid = last.get("pid")
    here = last.get("event") == "start" and last.get("host") == host()
    with contextlib.suppress(psutil.Error, ValueError, OverflowError):
        # Not one that bears its number now, as after a restart of a container.
        return here and isinstance(pid, int) and psutil.Process(pid).create_time() <= last["time"]
    return False


def number(values: Mapping[str, Any], key: str) -> Any:
    """Return a finite number of a run's own file, None where something else stands there."""
    value = values.get(key)
    # Beyond 1e15 no step, speed or time is one.
    return value if is_number(value) and abs(value) < 1e15 else None


def _done(row: RunStatus) -> RunStatus:
    row.state = "done"
    if not row.run.trains:
        return row
    summary = run_folder.read(Path(row.run.folder) / "summary.json")
    row.step, row.speed = number(summary, "step"), number(summary, "images_per_s")
    row.trained = number(summary, "wall_s") or 0.0
    # It may have been launched elsewhere.
    row.elapsed = max(row.elapsed, number(summary, "session_s") or 0.0)
    if row.step != row.steps:
        row.why = f"other length: {row.steps} steps are wanted"
    scores = summary.get("scores")
    first = list(scores.items())[:2] if isinstance(scores, dict) else []
    row.score = "  ".join(f"{k} {v:.4g}" for k, v in first if isinstance(v, int | float))
    return row


def _running(row: RunStatus, events: list[dict[str, Any]], times: list[float]) -> RunStatus:
    row.state = "running" if times and not row.run.trains else "starting"
    if not times:
        return row
    row.elapsed = _spent(events, time.time())
    beat = run_folder.read(Path(row.run.folder) / "status.json") if row.run.trains else {}
    now = number(beat, "time") or 0.0
    if now < max(times):  # of an earlier attempt
        return row
    row.state, row.beat = "running", max(0.0, time.time() - now)
    row.step, row.speed = number(beat, "step"), number(beat, "images_per_s")
    told = number(beat, "eta_s")
    row.eta = None if told is None else max(0.0, told - row.beat)
    if row.step is not None and row.step == row.steps:
        row.why, row.eta = "last evaluation", row.eta or None
    return row


def _ended(
    sweep: Sweep, row: RunStatus, batch: JobBatch, last: Mapping[str, Any],
    events: Sequence[Mapping[str, Any]], job: slurm.QueueJob, trouble: str,
) -> tuple[str, str]:  # fmt: skip
    """Return the state and the reason of a run without a job; `last` is its job's last word."""
    how = last.get("how")
    if how in ("failed", "given up"):
        # Other ranks fail because the first one does.
        ends = [e for e in events if e["event"] == "end" and e.get("rank") == 0]
        ends = [e for e in ends[-1:] if "error" in e and e.get("job") == last.get("job")]
        told = ends[0] if ends else last
        where = f"  ({told['where']})" if told.get("where") else ""
        return "failed", " ".join(str(told.get("error", "")).split()) + where
    if how == "done":
        why = "more steps are wanted" if row.run.trains else "its run has gone on since"
        return "stopped", why
    if last.get("event") == "cancelled" or job.state == "CANCELLED":
        return "stopped", "cancelled"
    if how == "stopped":
        return "stopped", str(last.get("signal", ""))
    if trouble and batch.kind == "slurm":
        return "starting" if row.attempts else "pending", "unknown: Slurm does not answer"
    if not batch.ids and not last:
        return "new", "its submission was cut off"
    if last.get("event") != "start" and not job.state:
        # A task that is cancelled while it waits leaves no trace where there is no accounting.
        return "stopped", "its job is gone"
    said, remarks = tail(sweep.log(batch, row.run.name, "err"))
    cause = in_words(job, remarks)
    # Whom a signal ended had no last word.
    said = f": {said}" if said and not cause.startswith("killed") else ""
    return "failed", f"{cause}, saved step {row.step or 0}{said}"


_ENDS = {
    "": "its job is gone",
    "ENDED": "its process is gone",  # of a pool
    "OUT_OF_MEMORY": "out of memory (cluster.memory_gb= asks for more)",
    "TIMEOUT": "its time limit came before it had saved (cluster.time=, cluster.signal_s=)",
    "NODE_FAIL": "its node failed",
    "BOOT_FAIL": "its node did not start",
    "DEADLINE": "its deadline came",
}


def in_words(job: slurm.QueueJob, remarks: str) -> str:
    """Return why a job ended that has left no word itself.

    Its exit code is `CODE:SIGNAL` by accounting, 128 + SIGNAL from a shell; `remarks` of Slurm in
    the log are such as `srun: error: task 0: Killed`.
    """
    state = job.state
    if state not in ("", "FAILED"):
        return _ENDS.get(state, state)
    code, _, number = job.exit.partition(":")
    killed = int(number or 0) or max(0, int(code or 0) - 128)
    died = re.findall(r"tasks? [\d,-]+: (?!Exited)([A-Z][A-Za-z ]+)", remarks)
    if killed == 9 or "Killed" in died:
        return KILLED
    if killed or died:
        return f"killed by signal {killed}" if killed else died[-1].strip()
    exit_code = f" with exit code {code}" if code not in ("", "0") else ""
    return f"{_ENDS.get(state, state)}{exit_code}"


def read_on(path: Path, start: int | None = None) -> tuple[str, int | None]:
    """Return a log from `start` on (None: its last 4 KiB), and where it ends; "" for no file."""
    with contextlib.suppress(OSError), path.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - 4096) if start is None else start)
        return log.read().decode(errors="replace"), log.tell()
    return "", start


def tail(path: Path | None) -> tuple[str, str]:
    """Return the last line of a log that a run wrote, and what Slurm put beside it."""
    lines = read_on(path)[0].splitlines() if path is not None else []
    theirs = ("srun:", "slurmstepd", "submitit ")
    own = [line.strip() for line in lines if line.strip() and not line.startswith(theirs)]
    return "".join(own[-1:])[:300], "\n".join(line for line in lines if line.startswith(theirs))


# --- time -----------------------------------------------------------------------------------------


def _spent(events: list[dict[str, Any]], now: float) -> float:
    """Return the seconds from starts to ends, or to `now`; what was killed has left no end."""
    spent, since = 0.0, None
    for event in events:
        if event["event"] == "start":
            since = event["time"]
        elif event["event"] == "end" and since is not None:
            spent, since = spent + max(0.0, event["time"] - since), None
    return spent + max(0.0, now - (since or now))


def estimate(rows: Sequence[RunStatus], latest: Mapping[str, JobBatch]) -> None:
    """Give live rows the seconds until they end: evaluations, start-up and their turn counted.

    A run's own estimate is of its steps. What else it takes is known from runs that have ended:
    best from one that differs in the seed alone. Pending runs take the places of those before
    them, as many at once as run now (or as the throttle allows, where that is what they wait for).
    """

    def left(row: RunStatus) -> float:
        like = max(len(_kind(row) & other) for other, _ in known)
        rate = fmean([rate for other, rate in known if len(_kind(row) & other) == like])
        return max(1.0, rate * (row.steps or 1) - row.elapsed)

    done = [row for row in rows if row.state == "done" and row.elapsed > 0]
    beside = fmean([row.elapsed - row.trained for row in done if row.trained] or [0.0])
    known = [(_kind(row), row.elapsed / max(1, row.step or row.steps or 1)) for row in done]
    active = [row for row in rows if row.state in ("running", "starting")]
    told = [row for row in active if row.eta is not None]
    for row in told:
        alike = any(kind == _kind(row) for kind, _ in known)
        row.eta = max(1.0, row.eta or 0.0, left(row)) if alike else (row.eta or 0.0) + beside
    known += [(_kind(row), (row.elapsed + (row.eta or 0.0)) / (row.steps or 1)) for row in told]
    known = known[-64:]  # thousands of rows are compared with each
    if not known:
        return
    for row in active:
        row.eta = left(row) if row.eta is None else row.eta
    waiting = [row for row in rows if row.state in ("pending", "requeued") and not row.held]
    batches = [latest[row.run.name] for row in waiting if row.run.name in latest]
    # The throttle of an array, the workers of a pool.
    limits = [number(b.resources, "workers" if b.kind == "local" else "throttle") for b in batches]
    limited = not active or any(row.why in ("JobArrayTaskLimit", POOL) for row in waiting)
    most = max(1, int(max((limit or 1 for limit in limits), default=1)))
    places = min(most, len(active) + len(waiting)) if limited else len(active)
    free = [row.eta or 0.0 for row in active] + [0.0] * (places - len(active))
    for row in waiting:
        free.sort()
        row.eta = free[0] + left(row)
        free[0] = row.eta


def _kind(row: RunStatus) -> frozenset[tuple[str, str]]:
    """Return what a run's duration may depend on: its stage and its words, the seed aside."""
    apart = ("seed", "paths.runs", "train.steps")
    words = [(k, v) for k, v in row.run.values.items() if k not in apart]
    return frozenset([("stage", row.run.stage), *words])
