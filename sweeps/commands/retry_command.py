"""`retry` and `cancel`: change what was launched.

Each run of a retry gets the resources of its last launch.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field

from sweeps.commands.arguments import Arguments
from sweeps.plan.resources import by_run
from sweeps.status.run_status import RunStatus
from sweeps.status.status import statuses
from sweeps.store.folder import Sweep
from sweeps.store.resource_options import Resources
from sweeps.submission.launch import retry
from sweeps.submission.live_jobs import cancel
from sweeps.submission.missing import DUE_STATES, Runs, find_due


@dataclass(frozen=True)
class RetryGroup:
    """Runs that are submitted together, and what each gets, by name."""

    resources: Resources
    runs: Runs = field(default_factory=list)
    resources_by_run: dict[str, Resources] = field(default_factory=dict)


def retry_command(options: argparse.Namespace) -> int:
    """Run `retry`: submit failed and stopped runs, each with the resources of its last launch."""
    arguments = Arguments(options)
    sweep, runs = arguments.select(options.grid, " ".join(options.overrides))
    rows = {row.run.name: row for row in statuses(sweep, runs)[0]}
    # Without any that are due, `retry` prints that, or that Slurm does not answer.
    groups = _group_by_cluster(sweep, find_due(runs, rows) or runs[:1], rows, arguments)
    failed = False
    # Runs in this process come last: the others do not have to wait for them.
    for group in sorted(groups, key=lambda group: group.resources.kind == "debug"):
        result = retry(
            sweep, group.runs, group.resources, resources_by_run=group.resources_by_run
        )
        failed = bool(result) or failed
    return int(failed)


def _group_by_cluster(
    sweep: Sweep, due: Runs, rows: Mapping[str, RunStatus], arguments: Arguments
) -> list[RetryGroup]:
    """Group runs of a retry by where they were launched last.

    A sweep may have several scales, and single runs may have been debugged.
    """
    latest, stored = sweep.latest_batches(), sweep.runs()
    groups: dict[str, RetryGroup] = {}
    keys: dict[str, str] = {}  # of the group of each run, by the run's name
    for run in due:
        batch = latest.get(run.name)
        base = arguments.resources_of_last_launch(stored, run, batch)
        run_resources = by_run(base, [run])[run.name]
        # One submission for all of a Slurm cluster, where runs may wait for each other.
        key = f"{base.name} {base.slurm_cluster}" if base.kind == "slurm" else repr(base)
        if rows[run.name].state not in DUE_STATES:  # group a table with a run it reads
            read = [keys[name] for name in (*run.after, *run.needs) if name in keys]
            if read and key not in read:
                key = read[-1]
                run_resources = by_run(groups[key].resources, [run])[run.name]
        keys[run.name] = key
        group = groups.setdefault(key, RetryGroup(base))
        group.runs.append(run)
        group.resources_by_run[run.name] = run_resources
    return list(groups.values())


def cancel_command(options: argparse.Namespace) -> None:
    """Run `cancel`."""
    sweep, runs = Arguments(options).select(options.grid, " ".join(options.overrides))
    cancel(sweep, runs)
