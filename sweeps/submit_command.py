"""`retry` and `cancel`: change what was launched."""

import argparse

from sweeps import grid, resources
from sweeps.arguments import Arguments, run_values
from sweeps.cancel import cancel
from sweeps.folder import JobBatch
from sweeps.launch import retry
from sweeps.planned_run import PlannedRun
from sweeps.resources import Resources
from sweeps.status import statuses


def retry_command(options: argparse.Namespace) -> int:
    """Run `retry`: submit failed and stopped runs, each with the resources of its last launch."""
    arguments = Arguments(options)
    sweep, runs = arguments.select(options.grid, " ".join(options.overrides))
    all_runs, latest = sweep.runs(), sweep.latest_batches()
    due = []
    for row in statuses(sweep, runs)[0]:
        if row.state in ("failed", "stopped"):
            due.append(row.run)
    names = {run.name for run in due}
    due += [run for run in runs if run.name not in names and names.intersection(run.after)]
    # A sweep may have several scales, and single runs may have been debugged.
    groups: dict[str, tuple[Resources, list[PlannedRun]]] = {}
    for run in due or runs[:1]:  # without any, `retry` prints that, or that there is no answer
        scale = run_values(run, all_runs).get("scale", "")
        last_resources = _last_resources(arguments, latest.get(run.name), scale)
        groups.setdefault(repr(last_resources), (last_resources, []))[1].append(run)
    code_grid = grid.load(options.grid) if options.grid.endswith(".py") else None
    failed = False
    # Runs in this process come last: the others do not have to wait for them.
    for group_resources, group in sorted(groups.values(), key=_is_debug):
        failed = bool(retry(sweep, group, group_resources, grid=code_grid)) or failed
    return int(failed)


def _is_debug(group: tuple[Resources, list[PlannedRun]]) -> bool:
    return group[0].kind == "debug"


def _last_resources(arguments: Arguments, batch: JobBatch | None, scale: str) -> Resources:
    if not arguments.cluster and batch is not None and batch.resources:
        return resources.resume(batch.resources, arguments.cluster_keys)
    return arguments.resources(scale=scale)


def cancel_command(options: argparse.Namespace) -> None:
    """Run `cancel`."""
    sweep, runs = Arguments(options).select(options.grid, " ".join(options.overrides))
    cancel(sweep, runs)
