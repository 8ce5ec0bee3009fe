"""What each run of a retry gets: the resources of its last launch, with more memory if it ran out.

`cluster.retry_memory` says how much more.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sweeps.plan.resources import by_run
from sweeps.status.run_status import RunStatus, finite_number
from sweeps.store.folder import JobBatch, Sweep
from sweeps.store.planned_run import PlannedRun
from sweeps.store.resource_options import Resources


@dataclass(frozen=True)
class RetryGroup:
    """Runs that are submitted together, and what each gets, by name."""

    resources: Resources
    runs: list[PlannedRun] = field(default_factory=list)
    resources_by_run: dict[str, Resources] = field(default_factory=dict)


def group_by_cluster(
    sweep: Sweep,
    due: Sequence[PlannedRun],
    rows: Mapping[str, RunStatus],
    base_resources: Callable[[PlannedRun, JobBatch | None], Resources],
    memory_is_typed: bool,
) -> list[RetryGroup]:
    """Group runs of a retry by where they were launched last; print who gets more memory.

    A sweep may have several scales, and single runs may have been debugged.

    Args:
        sweep: The sweep.
        due: The runs.
        rows: Their status by name.
        base_resources: Returns the resources of a run's last submission, or of the cluster that
            was typed.
        memory_is_typed: Whether `cluster.memory_gb` is typed for the retry.
    """
    latest = sweep.latest_batches()
    groups: dict[str, RetryGroup] = {}
    for run in due:
        batch = latest.get(run.name)
        base = base_resources(run, batch)
        run_resources, explanation = resources_of_retry(
            rows[run.name],
            by_run(base, [run])[run.name],
            last_gb=finite_number(batch.resources if batch is not None else {}, "memory_gb"),
            is_typed=memory_is_typed,
        )
        if explanation:
            print(explanation)
        # One submission for all of a Slurm cluster, where runs may wait for each other.
        key = f"{base.name} {base.slurm_cluster}" if base.kind == "slurm" else repr(base)
        group = groups.setdefault(key, RetryGroup(base))
        group.runs.append(run)
        group.resources_by_run[run.name] = run_resources
    return list(groups.values())


def resources_of_retry(
    row: RunStatus, resources: Resources, last_gb: float | None, is_typed: bool
) -> tuple[Resources, str]:
    """Return the resources of a retry, and the line that explains them ("" for no change).

    Args:
        row: The status of the run.
        resources: Those of its last launch, or of the cluster that was typed again.
        last_gb: What it had, None if that is unknown.
        is_typed: Whether `cluster.memory_gb` is typed for the retry; then it is not changed.
    """
    factor, memory = resources.retry_memory, resources.memory_gb
    if factor is None or memory is None or resources.kind != "slurm" or is_typed:
        return resources, ""
    if not row.memory_ran_out and row.allocation_failed and resources.gpu_count:
        return resources, (
            f"{row.run.name} ran out of GPU memory, which cluster.retry_memory does not change: "
            "type a smaller train.micro_batch="
        )
    if not row.memory_ran_out and not row.allocation_failed:
        return resources, ""
    memory = max(memory, last_gb or 0.0)
    limit = resources.max_memory_gb
    more = memory * factor if limit is None else min(memory * factor, limit)
    fixed = sorted({*resources.fixed, "memory_gb"})  # a grid's `cluster` has the amount before
    larger = dataclasses.replace(resources, memory_gb=more, fixed=fixed)
    text = f"{row.run.name} ran out of memory at {memory:g} GB"
    if limit is not None and more <= memory:
        return larger, f"{text} and gets no more: cluster.max_memory_gb={limit:g}"
    cap = f", the most that cluster.max_memory_gb={limit:g} allows" if more == limit else ""
    return larger, f"{text} and gets {more:g} GB{cap}"
