"""Where every run stands: from its folder, the jobs' own records, and two Slurm calls."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweeps.errors import SweepError
from sweeps.jobs import pool, slurm
from sweeps.jobs import run_folder as state
from sweeps.jobs.job import done_mark
from sweeps.jobs.sweep_folder import Batch, Sweep, all_sweeps
from sweeps.planning.plan import Run

ORDER = ("running", "starting", "failed", "requeued", "pending", "stopped", "new", "done")
# Beyond it no step, speed or time is one; NaN is not below it.
_LARGEST = 1e15
LIVE = ("running", "starting", "requeued", "pending")


@dataclass
class Standing:
    """One line of the status table."""

    run: Run
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

    @property
    def live(self) -> bool:
        """Whether a job for it is in a queue or running."""
        return self.state in LIVE


@dataclass
class Jobs:
    """What the schedulers say now; one call each, made when first needed."""

    queued: dict[str, slurm.QueueJob] | None = None
    known: dict[str, slurm.QueueJob] | None = None
    pools: dict[tuple[str, str], dict[str, str]] | None = None
    trouble: str = ""


def is_done(sweep: Sweep, run: Run) -> bool:
    """Whether nothing is left to do for a run."""
    if run.trains:
        return state.finished(run.folder, run.steps)
    return done_mark(sweep.root, sweep.name, run.name).is_file()


def stand(sweep: Sweep, runs: Iterable[Run] | None = None) -> tuple[list[Standing], str]:
    """Return where runs stand, and what is wrong with the scheduler ("" if nothing)."""
    batches = sweep.batches()
    latest = {run: batch for batch in batches for run in batch.runs}
    jobs = ask(sweep, latest)
    chosen = list(sweep.runs().values() if runs is None else runs)
    rows = [_standing(sweep, run, latest.get(run.name), jobs) for run in chosen]
    return sorted(rows, key=lambda row: ORDER.index(row.state)), jobs.trouble


def ask(sweep: Sweep, latest: dict[str, Batch], history: bool = True) -> Jobs:
    """Ask Slurm (two calls at most) and the pools about the latest jobs of runs."""
    jobs = Jobs({}, {}, {})
    found = {id(batch): batch for batch in latest.values()}.values()
    if any(batch.kind == "slurm" for batch in found):
        try:
            jobs.queued = slurm.queue()
        except SweepError as error:
            jobs.trouble = str(error)
        adopt(sweep, found, jobs.queued or {})
        ids = [b.ids[r] for r, b in latest.items() if b.kind == "slurm" and r in b.ids]
        gone = [i for i in ids if i not in (jobs.queued or {})]
        jobs.known = slurm.history(gone) if history and gone and not jobs.trouble else {}
    for batch in found:
        if batch.kind == "local":
            jobs.pools = {
                **(jobs.pools or {}),
                (sweep.name, batch.name): pool.states(sweep, batch.name),
            }
    return jobs


def adopt(sweep: Sweep, batches: Iterable[Batch], queued: dict[str, slurm.QueueJob]) -> None:
    """Give a batch whose submission was cut off the ids of the jobs that bear its name."""
    for batch in batches:
        if batch.kind != "slurm" or batch.ids:
            continue
        mine = [j.id for j in queued.values() if j.name == batch.name]
        if mine:
            mine.sort(key=lambda i: [int(n) for n in i.split("_")])
            # Arrays are filled in the order of the batch's runs.
            ids = dict(zip(batch.runs, mine, strict=False))
            batch.ids.update(ids)
            sweep.submitted(batch.name, ids, "found in the queue")


def live_anywhere(root: Path) -> dict[str, str]:
    """Return the runs below `root` that have a live job in any sweep, with that sweep's name."""
    found = {}
    for sweep in all_sweeps(root):
        latest = {run: batch for batch in sweep.batches() for run in batch.runs}
        jobs = ask(sweep, latest, history=False)
        if jobs.trouble:
            raise SweepError(f"{jobs.trouble} (without the queue nobody knows which runs are live)")
        for run, batch in latest.items():
            if _job_state(sweep, batch, run, jobs)[0] in ("PENDING", "RUNNING"):
                found[run] = sweep.name
    return found


def _job_state(
    sweep: Sweep, batch: Batch, run: str, jobs: Jobs
) -> tuple[str, slurm.QueueJob | None]:
    """Return PENDING, RUNNING, another Slurm state, or "" for a run's latest job."""
    if batch.kind == "local":
        return (jobs.pools or {}).get((sweep.name, batch.name), {}).get(run, ""), None
    if batch.kind == "debug":
        return "", None
    job = (jobs.queued or {}).get(batch.ids.get(run, ""))
    # Another job may bear the same id after a cluster was set up anew: the name tells.
    if job is not None and job.name == batch.name:
        if job.live:
            return ("RUNNING" if job.state in slurm.RUNNING else "PENDING"), job
        return job.state, job
    job = (jobs.known or {}).get(batch.ids.get(run, ""))
    return (job.state if job else ""), job


def _standing(sweep: Sweep, run: Run, batch: Batch | None, jobs: Jobs) -> Standing:
    row = Standing(run, "new", steps=run.steps)
    events = sweep.attempts(run.name).events() if batch else []
    row.attempts = sum(e["event"] == "start" for e in events)
    if is_done(sweep, run):
        return _done(row)
    if batch is None:
        return row
    row.job = batch.ids.get(run.name, "")
    found, job = _job_state(sweep, batch, run.name, jobs)
    row.node = job.node if job else ""
    if found == "RUNNING":
        return _running(row, events)
    row.step = state.saved_step(run.folder) if run.trains else None
    if found == "PENDING":
        row.state = "requeued" if row.attempts else "pending"
        row.why = (
            job.reason if job and job.reason != "None" else "waits for a worker" if not job else ""
        )
        return row
    return _ended(sweep, row, batch, events, found, job, jobs.trouble)


def number(values: Mapping[str, Any], key: str) -> Any:
    """Return a finite number of a run's own file, None where something else stands there."""
    value = values.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value if abs(value) < _LARGEST else None


def _done(row: Standing) -> Standing:
    row.state = "done"
    if row.run.trains:
        summary = state.read(Path(row.run.folder) / "summary.json")
        row.step, row.speed = number(summary, "step"), number(summary, "images_per_s")
        scores = summary.get("scores")
        if isinstance(scores, dict):
            row.score = "  ".join(
                f"{key} {value:.4g}"
                for key, value in list(scores.items())[:2]
                if isinstance(value, int | float)
            )
    return row


def _running(row: Standing, events: list[dict[str, Any]]) -> Standing:
    started = max((e["time"] for e in events if e["event"] == "start"), default=None)
    beat = state.read(Path(row.run.folder) / "status.json") if row.run.trains else {}
    row.state = "starting" if started is None else "running"
    now = number(beat, "time") or 0.0
    if started is not None and now >= started:
        row.step, row.speed = number(beat, "step"), number(beat, "images_per_s")
        row.eta = number(beat, "eta_s")
        row.beat = max(0.0, time.time() - now)
    elif started is not None:
        row.step = state.saved_step(row.run.folder) if row.run.trains else None
        row.state = "running" if not row.run.trains else "starting"
    return row


def _ended(
    sweep: Sweep, row: Standing, batch: Batch, events: list[dict[str, Any]], found: str,
    job: slurm.QueueJob | None, trouble: str,
) -> Standing:  # fmt: skip
    last = events[-1] if events else {}
    failed = next((e for e in reversed(events) if e["event"] == "end" and e.get("rank") == 0), last)
    if last.get("event") in ("retry", "cancelled"):
        cancelled, last = last["event"] == "cancelled", {}
    else:
        cancelled = found == "CANCELLED"
    if last.get("how") in ("failed", "given up"):
        told = failed if failed.get("how") in ("failed", "given up") else last
        row.state, where = "failed", told.get("where")
        row.why = " ".join(str(told.get("error", "")).split()) + (f"  ({where})" if where else "")
    elif last.get("how") == "done":
        row.why = "more steps are wanted"
    elif cancelled or last.get("how") == "stopped":
        row.state, row.why = "stopped", "cancelled" if cancelled else str(last.get("signal", ""))
    elif trouble and batch.kind == "slurm":
        row.state, row.why = (
            "starting" if row.attempts else "pending",
            "unknown: Slurm does not answer",
        )
    elif not batch.ids and not events:
        row.state, row.why = "new", "its submission was cut off"
    elif not last and not found:
        # A task that is cancelled while it waits leaves no trace where there is no accounting.
        row.state, row.why = "stopped", "its job is gone"
    else:
        row.state = "failed"
        row.why = _death(sweep, row, batch, found, job)
    return row


def _death(
    sweep: Sweep, row: Standing, batch: Batch, found: str, job: slurm.QueueJob | None
) -> str:
    exit_code = f" {job.exit}" if job and job.exit not in ("", "0:0") else ""
    what = f"{found or 'its job is gone'}{exit_code}"
    said = tail(log_of(sweep, batch, row.run.name, "err"))
    return f"{what}, saved step {row.step or 0}" + (f": {said}" if said else "")


def log_of(sweep: Sweep, batch: Batch, run: str, kind: str) -> Path | None:
    """Return the path of a run's log in a batch: `kind` is out or err."""
    if batch.kind == "slurm":
        return sweep.logs / f"{batch.ids[run]}_0_log.{kind}" if run in batch.ids else None
    return sweep.logs / f"{batch.name}_{run}.{kind}"


def tail(path: Path | None, size: int = 4096) -> str:
    """Return the last line of a log that says something, Slurm's own remarks last."""
    if path is None:
        return ""
    try:
        with path.open("rb") as handle:
            handle.seek(max(0, path.stat().st_size - size))
            lines = handle.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    said = [line.strip() for line in lines if line.strip()]
    own = [line for line in said if not line.startswith(("srun:", "slurmstepd:", "submitit "))]
    return (own or said or [""])[-1][:300]
