"""When the runs of a sweep will end: evaluations, start-up and waiting included.

A run's own estimate covers its steps. The rest of its time is estimated from runs that have ended,
preferably from one that differs in the seed only.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

from sweeps.status.run_status import WAITS_FOR_WORKER, RunStatus, finite_number
from sweeps.store.folder import JobBatch

Kind = frozenset[tuple[str, str]]


def estimate_etas(rows: Sequence[RunStatus], latest: Mapping[str, JobBatch]) -> None:
    """Set `eta` of live rows, in seconds; it stays None while nothing is known.

    Pending runs take the slots of those before them, as many at once as run now (or as the throttle
    allows, where that is what they wait for).
    """
    rates = _Rates()
    done = [row for row in rows if row.state == "done" and row.elapsed > 0]
    for row in done:
        rates.add(row, row.elapsed / max(1, row.step or row.steps or 1))
    active = [row for row in rows if row.state in ("running", "starting")]
    own_estimates = [row for row in active if row.eta is not None]
    overhead = fmean([row.elapsed - row.trained for row in done if row.trained] or [0.0])
    for row in own_estimates:
        if rates.has(row):
            row.eta = max(1.0, row.eta or 0.0, rates.remaining(row))
        else:
            row.eta = (row.eta or 0.0) + overhead
    for row in own_estimates:
        rates.add(row, (row.elapsed + (row.eta or 0.0)) / (row.steps or 1))
    if not rates.entries:
        return
    for row in active:
        if row.eta is None:
            row.eta = rates.remaining(row)
    _queue_waiting(rows, active, rates, latest)


class _Rates:
    """Seconds per step of runs, by what their duration depends on."""

    def __init__(self) -> None:
        self.entries: list[tuple[Kind, float]] = []

    def add(self, row: RunStatus, seconds_per_step: float) -> None:
        self.entries.append((_kind(row), seconds_per_step))
        del self.entries[:-64]  # each of thousands of rows is compared with all entries

    def has(self, row: RunStatus) -> bool:
        """Return whether a run that differs in the seed only is known."""
        kinds = [kind for kind, _ in self.entries]
        return _kind(row) in kinds

    def remaining(self, row: RunStatus) -> float:
        """Return the seconds until a run ends, from the mean rate of those most like it."""
        own_kind = _kind(row)
        best, rates = -1, list[float]()
        for kind, rate in self.entries:
            common = len(own_kind & kind)
            if common > best:
                best, rates = common, []
            if common == best:
                rates.append(rate)
        return max(1.0, fmean(rates) * (row.steps or 1) - row.elapsed)


def _queue_waiting(
    rows: Sequence[RunStatus],
    active: Sequence[RunStatus],
    rates: _Rates,
    latest: Mapping[str, JobBatch],
) -> None:
    """Set `eta` of waiting rows: each takes the slot that is free first."""
    waiting = [row for row in rows if row.state in ("pending", "requeued") and not row.held]
    slots = len(active)
    if not active or any(row.why in ("JobArrayTaskLimit", WAITS_FOR_WORKER) for row in waiting):
        slots = min(_throttle(waiting, latest), len(active) + len(waiting))
    free_at = [row.eta or 0.0 for row in active] + [0.0] * (slots - len(active))
    for row in waiting:
        free_at.sort()
        row.eta = free_at[0] + rates.remaining(row)
        free_at[0] = row.eta


def _throttle(waiting: Sequence[RunStatus], latest: Mapping[str, JobBatch]) -> int:
    """Return the throttle of the waiting runs' arrays, or the workers of their pools."""
    limit = 1.0
    for row in waiting:
        batch = latest.get(row.run.name)
        if batch is not None:
            key = "workers" if batch.kind == "local" else "throttle"
            limit = max(limit, finite_number(batch.resources, key) or 1)
    return int(limit)


def _kind(row: RunStatus) -> Kind:
    """Return what a run's duration may depend on: its stage and its overrides but the seed."""
    pairs = [("stage", row.run.stage)]
    for key, value in row.run.values.items():
        if key not in ("seed", "paths.runs", "train.steps"):
            pairs.append((key, value))
    return frozenset(pairs)
