"""Many runs: grids of overrides, launched on Slurm, on this machine or in this process.

`python -m sweeps launch GRID`, `status`, `retry`, `cancel`, `show` and `list`. Nothing here imports
torch except the job itself, so planning 2,000 runs and looking at them stays fast.
"""

from experiments.runtime.lazy import lazily
from routing.errors import UserError

_HOME = {
    "GridCell": "planning.grid",
    "Grid": "planning.grid",
    "Job": "jobs.job",
    "Plan": "planning.planned_runs",
    "PlannedRun": "planning.planned_runs",
    "Sweep": "jobs.sweep_folder",
    "expand": "planning.grid",
    "load": "planning.grid",
    "names": "planning.grid",
    "plan": "planning.planned_runs",
}
__all__ = sorted([*_HOME, "SweepError"])
__getattr__, __dir__ = lazily(__name__, _HOME)


class SweepError(UserError):
    """A wrong grid, resource, override or command: one sentence with what to type instead."""
