"""`retry` and `cancel`: change what was launched."""

import argparse

from sweeps import grid
from sweeps.arguments import Arguments
from sweeps.cancel import cancel
from sweeps.last_launch import RetryGroup, group_by_cluster
from sweeps.retry import retry
from sweeps.status import statuses


def retry_command(options: argparse.Namespace) -> int:
    """Run `retry`: submit failed and stopped runs, each with the resources of its last launch."""
    arguments = Arguments(options)
    sweep, runs = arguments.select(options.grid, " ".join(options.overrides))
    rows = {row.run.name: row for row in statuses(sweep, runs)[0]}
    due = [run for run in runs if rows[run.name].state in ("failed", "stopped")]
    names = {run.name for run in due}
    due += [run for run in runs if run.name not in names and names.intersection(run.after)]
    # Without any, `retry` prints that, or that there is no answer.
    groups = group_by_cluster(arguments, sweep, due or runs[:1], rows)
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
