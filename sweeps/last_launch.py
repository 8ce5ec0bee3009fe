"""Where the runs of a retry were launched last, and what each of them gets there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sweeps import resources
from sweeps.arguments import Arguments, run_values
from sweeps.folder import Sweep
from sweeps.planned_run import PlannedRun
from sweeps.resource_options import Resources
from sweeps.retry_memory import resources_of_retry
from sweeps.run_status import RunStatus, finite_number


@dataclass(frozen=True)
class RetryGroup:
    """Runs that are submitted together, and what each gets, by name."""

    resources: Resources
    runs: list[PlannedRun] = field(default_factory=list)
    resources_by_run: dict[str, Resources] = field(default_factory=dict)


def group_by_cluster(
    arguments: Arguments, sweep: Sweep, due: Sequence[PlannedRun], rows: Mapping[str, RunStatus]
) -> list[RetryGroup]:
    """Group runs of a retry by where they were launched last, with what each gets there.

    A sweep may have several scales, and single runs may have been debugged. What changes since
    memory ran out is printed.
    """
    all_runs, latest = sweep.runs(), sweep.latest_batches()
    groups: dict[str, RetryGroup] = {}
    for run in due:
        batch = latest.get(run.name)
        if arguments.cluster or batch is None or not batch.resources:
            base = arguments.resources(scale=run_values(run, all_runs).get("scale", ""))
        else:
            base = resources.resume(batch.resources, arguments.cluster_keys)
        run_resources, explanation = resources_of_retry(
            rows[run.name],
            resources.by_run(base, [run])[run.name],
            last_gb=finite_number(batch.resources if batch is not None else {}, "memory_gb"),
            is_typed="memory_gb" in arguments.cluster_keys,
        )
        if explanation:
            print(explanation)
        # One submission for all of a Slurm cluster, where runs may wait for each other.
        key = f"{base.name} {base.slurm_cluster}" if base.kind == "slurm" else repr(base)
        group = groups.setdefault(key, RetryGroup(base))
        group.runs.append(run)
        group.resources_by_run[run.name] = run_resources
    return list(groups.values())
