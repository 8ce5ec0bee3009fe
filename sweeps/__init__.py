"""Many runs: grids of overrides, launched on Slurm, on this machine or in this process.

`python -m sweeps launch GRID`, `status`, `retry`, `cancel`, `show` and `list`. Nothing here imports
torch except the job itself, so planning 2,000 runs and looking at them stays fast.
"""

import importlib
from typing import Any

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


class SweepError(UserError):
    """A wrong grid, resource, override or command: one sentence with what to type instead."""


def __getattr__(name: str) -> Any:
    """Import the module of a public name when it is first asked for (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'sweeps' has no attribute {name!r}")
    return getattr(importlib.import_module(f"sweeps.{_HOME[name]}"), name)
