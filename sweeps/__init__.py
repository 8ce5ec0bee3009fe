"""Many runs: grids of overrides, launched on Slurm, on this machine or in this process.

`python -m sweeps launch GRID`, `status`, `cancel`, `show` and `list`. Only jobs, and what
plans them, may import torch: looking at a sweep stays fast.
"""

from routing.errors import UserError
from routing.lazy import lazily

__getattr__, __dir__, _names = lazily(
    __name__,
    {
        "plan.grid": ("Grid", "load", "names"),
        "plan.cells": ("GridCell", "expand"),
        "plan.plan": ("Plan", "make_plan"),
        "store.planned_run": ("PlannedRun",),
        "jobs.job": ("Job",),
        "store.folder": ("Sweep",),
    },
)
__all__ = sorted([*_names, "SweepError"])


class SweepError(UserError):
    """An invalid grid, cluster file, override or command, described in one sentence."""


class NothingSubmitted(SweepError):
    """A submission failed, and none of its jobs is in the queue: its record can be removed."""
