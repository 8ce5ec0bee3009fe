"""What a run of a later stage waits for, and how it gets its configuration when it starts.

A run with a `parent` starts once that run is done; a run with `after` starts once those runs have
ended, however they ended. Where `init={parent}` makes the parent's weights part of the identity of
a run, the run is named after its cell. If the parent is not done at the launch, the job works out
the run folder as it starts (`resolve`).
"""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from experiments.runtime import run_folder
from routing.errors import UserError, require
from sweeps import SweepError
from sweeps.store.folder import Sweep, read_record
from sweeps.store.planned_run import PARENT, PlannedRun, RunRecord


def levels(runs: Sequence[PlannedRun]) -> list[list[PlannedRun]]:
    """Group runs so that each group waits for earlier groups only."""
    depth: dict[str, int] = {}
    groups: list[list[PlannedRun]] = []
    for run in runs:
        own_depth = 0
        for name in run.needs:
            own_depth = max(own_depth, depth.get(name, -1) + 1)
        depth[run.name] = own_depth
        while len(groups) <= own_depth:
            groups.append([])
        groups[own_depth].append(run)
    return groups


def is_parent_done(sweep: Sweep, run: RunRecord) -> bool:
    """Return whether a run has no parent, or one that is done and has not diverged."""
    if not run.parent:
        return True
    parent = sweep.runs().get(run.parent)
    return parent is not None and sweep.is_done(parent) and not has_diverged(parent)


def has_diverged(run: RunRecord) -> bool:
    """Return whether a run trained to its end and diverged: nothing is to start from it."""
    return run.trains and run_folder.diverged(run.folder)


def resolve(sweep: Sweep, run: PlannedRun, write: bool, wait_s: float) -> PlannedRun:
    """Return a run with its final arguments and folder, as its job starts.

    With `write` the folder is stored for `status`. Files that another node has written may take
    `wait_s` to appear on this one.

    Raises:
        SweepError: Its parent is not done.
    """
    deadline = time.monotonic() + wait_s
    while not is_parent_done(sweep, run) and time.monotonic() < deadline:
        time.sleep(1.0)
    require(
        is_parent_done(sweep, run),
        f"its parent {run.parent} has not finished, or has diverged; when it has finished, launch "
        "the grid with --retry",
        SweepError,
    )
    if not run.deferred:
        return run
    folder = sweep.runs()[run.parent].folder
    # Within the quotes that the argument has where the path needs them.
    arguments = [text.replace(PARENT, folder.replace('"', '\\"')) for text in run.args]
    if run.trains:
        from experiments.config import load

        folder = str(sweep.root / load(arguments).name)
    if write:
        sweep.resolve(run.name, folder)
    return dataclasses.replace(run, args=arguments, folder=folder, deferred=False)


def read_job(path: str) -> PlannedRun | None:
    """Return the run of a pool's job file; None if it is damaged, which the job will report."""
    try:
        return read_record(PlannedRun, run_folder.read(path).get("run"))
    except UserError:
        return None


def display_name(run: RunRecord) -> str:
    """Return the name of the run folder, or of the cell while that is unknown."""
    return Path(run.folder).name if run.trains and Path(run.folder).is_dir() else run.name
