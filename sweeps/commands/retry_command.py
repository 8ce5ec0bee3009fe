"""`retry` and `cancel`: change what was launched."""

import argparse
import functools

from sweeps.commands.arguments import Arguments
from sweeps.plan import grid
from sweeps.status.status import statuses
from sweeps.submission.launch import retry
from sweeps.submission.live_jobs import cancel
from sweeps.submission.retry_resources import RetryGroup, group_by_cluster


def retry_command(options: argparse.Namespace) -> int:
    """Run `retry`: submit failed and stopped runs, each with the resources of its last launch."""
    arguments = Arguments(options)
    sweep, runs = arguments.select(options.grid, " ".join(options.overrides))
    rows = {row.run.name: row for row in statuses(sweep, runs)[0]}
    due = [run for run in runs if rows[run.name].state in ("failed", "stopped")]
    names = {run.name for run in due}
    due += [run for run in runs if run.name not in names and names.intersection(run.after)]
    groups = group_by_cluster(
        sweep,
        due or runs[:1],  # without any, `retry` prints that, or that Slurm does not answer
        rows,
        functools.partial(arguments.resources_of_last_launch, sweep.runs()),
        memory_is_typed="memory_gb" in arguments.cluster_keys,
    )
    code_grid = grid.load(options.grid) if options.grid.endswith(".py") else None
    failed = False
    # Runs in this process come last: the others do not have to wait for them.
    for group in sorted(groups, key=_is_debug):
        result = retry(
            sweep, group.runs, group.resources, grid=code_grid,
            resources_by_run=group.resources_by_run,
        )  # fmt: skip
        failed = bool(result) or failed
    return int(failed)


def _is_debug(group: RetryGroup) -> bool:
    return group.resources.kind == "debug"


def cancel_command(options: argparse.Namespace) -> None:
    """Run `cancel`."""
    sweep, runs = Arguments(options).select(options.grid, " ".join(options.overrides))
    cancel(sweep, runs)
