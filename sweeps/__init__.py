"""Many runs: grids of overrides, launched on Slurm, on this machine or in this process.

`python -m sweeps launch GRID`, `status`, `retry`, `cancel`, `show` and `list`. Nothing here imports
torch except the job itself, so planning 2,000 runs and looking at them stays fast.
"""

from routing.errors import UserError
from routing.lazy import lazily

__getattr__, __dir__, _names = lazily(
    __name__,
    {
        "planning.grid": ("Grid", "GridCell", "expand", "load", "names"),
        "jobs.job": ("Job",),
        "planning.planned_runs": ("Plan", "PlannedRun", "plan"),
        "jobs.sweep_folder": ("Sweep",),
    },
)
__all__ = sorted([*_names, "SweepError"])


class SweepError(UserError):
    """A wrong grid, resource, override or command: one sentence with what to type instead."""
