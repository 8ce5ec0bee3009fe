"""The arrays of a launch on Slurm: one for the runs of a stage that get the same resources."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sweeps.dependencies import levels
from sweeps.planned_run import PlannedRun
from sweeps.resource_options import Resources


def count(items: Sequence[object], noun: str = "run") -> str:
    """Return `1 run`, `2 runs`."""
    return f"{len(items)} {noun}{'s' if len(items) > 1 else ''}"


@dataclass(frozen=True)
class JobArray:
    """Runs that become one array, since nobody waits for another and all get the same.

    A site that limits the length of arrays gets it in parts.
    """

    resources: Resources
    runs: list[PlannedRun] = field(default_factory=list)

    @property
    def task_count(self) -> int:
        """How many tasks it has; several runs may share one."""
        return -(-len(self.runs) // self.resources.runs_per_gpu)

    @property
    def sharing(self) -> int:
        """How many runs share a task, at most."""
        return min(self.resources.runs_per_gpu, len(self.runs))

    def describe(self) -> str:
        """Return its runs, what each gets, and how many run at once, on one line."""
        text = count(self.runs)
        if self.task_count < len(self.runs):
            text = f"{text} in {count(range(self.task_count), 'task')}"
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
