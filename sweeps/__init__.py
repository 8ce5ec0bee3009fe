"""Many runs: grids of overrides, launched on Slurm, on this machine or in this process.

`python -m sweeps launch GRID`, `status`, `retry`, `cancel`, `show` and `list`. Only jobs, and what
plans them, may import torch: looking at a sweep stays fast.
"""

from routing.errors import UserError
from routing.lazy import lazily

__getattr__, __dir__, _names = lazily(
    __name__,
    {
        "grid": ("Grid", "load", "names"),
        "cells": ("GridCell", "expand"),
        "plan": ("Plan", "make_plan"),
        "planned_run": ("PlannedRun",),
        "job": ("Job",),
        "folder": ("Sweep",),
    },
)
__all__ = sorted([*_names, "SweepError"])


class SweepError(UserError):
    """An invalid grid, cluster file, override or command, described in one sentence."""
