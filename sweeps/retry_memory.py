"""More memory for the retry of a run that ran out of it (`cluster.retry_memory`)."""

import dataclasses

from sweeps.job_end import KILLED
from sweeps.resource_options import Resources
from sweeps.run_status import RunStatus

# Errors with which a run itself reports that an allocation failed.
_ALLOCATION_ERRORS = ("out of memory", "allocate memory", "MemoryError", "std::bad_alloc")


def resources_of_retry(
    row: RunStatus, resources: Resources, last_gb: float | None, is_typed: bool
) -> tuple[Resources, str]:
    """Return the resources of a retry, and the line that explains them ("" for no change).

    Args:
        row: The status of the run.
        resources: Those of its last launch, or of the cluster that was typed again.
        last_gb: What it had, None if that is unknown.
        is_typed: Whether `cluster.memory_gb` is typed for the retry, which settles it.
    """
    factor, memory = resources.retry_memory, resources.memory_gb
    if factor is None or memory is None or resources.kind != "slurm" or is_typed:
        return resources, ""
    is_own_error = any(text in row.why for text in _ALLOCATION_ERRORS)
    is_own_error = is_own_error and row.state == "failed" and not row.why.startswith(KILLED)
    if not row.memory_ran_out and is_own_error and resources.gpu_count:
        return resources, (
            f"{row.run.name} ran out of GPU memory, which cluster.retry_memory does not change: "
            "type a smaller train.micro_batch="
        )
    if not row.memory_ran_out and not is_own_error:
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
