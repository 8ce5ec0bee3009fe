"""The arrays of a launch on Slurm, submitted in order.

The runs of a stage that get the same resources are one array.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from routing.errors import UserError
from sweeps import SweepError
from sweeps.jobs import slurm
from sweeps.plan.dependencies import levels
from sweeps.store.folder import JobBatch, Sweep
from sweeps.store.planned_run import PlannedRun
from sweeps.store.resource_options import Resources
from sweeps.submission.live_jobs import LiveJobs


def plural(count: int, noun: str) -> str:
    """Return `1 run`, `2 runs`."""
    return f"{count} {noun}{'s' if count > 1 else ''}"


@dataclass(frozen=True)
class JobArray:
    """Runs of one array: none waits for another, and all get the same resources.

    A site that limits the length of arrays gets it in parts.
    """

    resources: Resources
    runs: list[PlannedRun] = field(default_factory=list)

    @property
    def task_count(self) -> int:
        """How many tasks it has; several runs may share one."""
        return math.ceil(len(self.runs) / self.resources.runs_per_gpu)

    def describe(self) -> str:
        """Return its runs, what each gets, and how many run at once, on one line."""
        text = plural(len(self.runs), "run")
        if self.task_count < len(self.runs):
            text = f"{text} in {plural(self.task_count, 'task')}"
        return f"{text}: {self.resources.describe()}; at most {self.resources.throttle} at once"


def split_into_arrays(
    runs: Sequence[PlannedRun], by_run: Mapping[str, Resources]
) -> list[JobArray]:
    """Split runs by what they wait for, then by resources: each array may wait for earlier ones."""
    arrays: list[JobArray] = []
    for level in levels(runs):
        of_level: dict[str, JobArray] = {}
        for run in level:
            resources = by_run[run.name]
            of_level.setdefault(repr(resources), JobArray(resources)).runs.append(run)
        arrays += of_level.values()
    return arrays


def submit_arrays(
    sweep: Sweep, arrays: Sequence[JobArray], launch: str, code: str, live: LiveJobs,
    say: Callable[[str], None],
) -> JobBatch:  # fmt: skip
    """Submit arrays in order, each of which may wait for earlier ones; return the last batch.

    A submission that is cut off is found in the queue by its jobs' name, which is the batch's.
    Hence more runs than one array may have are several batches; each starts when the one before it
    has ended.
    """
    # Imports submitit, which looking at a sweep does not need.
    from sweeps.jobs import sbatch

    limit = slurm.max_array(arrays[0].resources.slurm_cluster)
    lines: list[str] = []
    array_ids: list[str] = []
    for array in arrays:
        resources, size = array.resources, limit * array.resources.runs_per_gpu
        if resources.runs_per_gpu > 1:
            live.shared.update(run.name for run in array.runs)
        previous = ""
        for start in range(0, len(array.runs), size):
            part = array.runs[start : start + size]
            batch = JobBatch.create(sweep.name, part, resources, code, launch)
            sweep.intend(batch)
            conditions = {run.name: live.condition(run) for run in part}
            try:
                ids = sbatch.submit(sweep, part, resources, batch, previous, conditions)
            except SweepError as error:
                if not array_ids:
                    raise
                # The earlier arrays are in the queue and stay noted.
                raise UserError(f"{error}; type the same launch to submit the rest") from None
            sweep.submitted(batch.name, ids, slurm_cluster=batch.slurm_cluster)
            live.ids |= ids
            previous = ids[part[0].name].split("_")[0]
            array_ids.append(previous)
            lines.append(f"  job {previous}: {JobArray(resources, part).describe()}")
    count = sum(len(array.runs) for array in arrays)
    jobs, each = ", ".join(array_ids), " each" if len(array_ids) > 1 else ""
    limit_text = f"at most {arrays[0].resources.throttle} at once{each}"
    say(f"submitted {plural(count, 'run')} as job {jobs}, {limit_text}; code {code}")
    for line in lines if len(array_ids) > 1 or resources.runs_per_gpu > 1 else ():
        say(line)
    say(sweep.command("status"))
    return batch
