"""What `show` and `list` print."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from sweeps.errors import SweepError
from sweeps.jobs.sweep_folder import Sweep, all_sweeps
from sweeps.planning import grid as grids
from sweeps.planning import plan
from sweeps.planning.plan import Run
from sweeps.view import standing, status_table

if TYPE_CHECKING:
    from sweeps.sweeps_command import Request


def grid(found: grids.Grid, request: Request) -> list[str]:
    """Return a grid in words: what it makes, and every run at the scale."""
    made = plan.plan(found, request.scale, request.user)
    lines = [
        f"{found.name}: {found.title}",
        f"makes: {', '.join(found.makes) or 'nothing of its own'}",
    ]
    if found.raw.get("note"):
        lines.append(" ".join(str(found.raw["note"]).split()))
    lines += [f"  {run.name}  {run.label}" for run in made.runs]
    lines += [f"  waits for {why}: {label}" for label, why in made.waiting]
    lines += [f"  left out: {label} ({why})" for label, why in made.left_out]
    return [*lines, f"{len(made.runs)} runs at scale {request.scale}, {len(made.waiting)} waiting"]


def run(sweep: Sweep, runs: list[Run], part: str) -> list[str]:
    """Return all that is on disk about the one run whose name contains `part`.

    Raises:
        SweepError: No run, or more than one, has it.
    """
    found = [r for r in runs if part in r.name]
    if len(found) != 1:
        some = ", ".join(r.name for r in (found or runs)[:4])
        raise SweepError(
            f"{len(found)} runs have {part!r} in their name; expected one, such as {some}"
        )
    (one,) = found
    (row,), trouble = standing.stand(sweep, [one])
    lines = [
        *status_table.plain([row]),
        f"folder   {one.folder}",
        f"command  {one.entry} {' '.join(one.args)}",
    ]
    for batch in sweep.batches():
        if one.name in batch.runs:
            job = batch.ids.get(one.name, "")
            lines.append(f"batch    {_date(batch.time)}  {batch.cluster}  {job}  code {batch.code}")
            log = standing.log_of(sweep, batch, one.name, "err")
            lines += [f"log      {log}"] if log and log.exists() else []
    for event in sweep.attempts(one.name).events():
        rest = {
            k: v for k, v in event.items() if k not in ("event", "time") and v not in (None, "")
        }
        text = "  ".join(f"{k} {v}" for k, v in rest.items())
        lines.append(f"{event['event']:<9}{_date(event['time'])}  {text}")
    return [*lines, trouble] if trouble else lines


def grids_and_sweeps(root: Path) -> list[str]:
    """Return the grids with their titles, and the launched sweeps with their counts."""
    names = grids.names()
    width = max(map(len, names))
    lines = [f"{name:<{width}}  {grids.load(name).title}" for name in names]
    for sweep in all_sweeps(root):
        rows, _ = standing.stand(sweep)
        lines.append(f"launched: {sweep.name}  {status_table.counts(rows)}")
    return lines


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
