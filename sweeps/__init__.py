"""Many runs: grids of overrides, launched on Slurm, on this machine or in this process.

`python -m sweeps launch GRID`, `status`, `retry`, `cancel`, `show` and `list`. Nothing here imports
torch except the job itself, so planning 2,000 runs and looking at them stays fast.
"""

from __future__ import annotations

from typing import Any

_HOME = {
    "Cell": "planning.grid",
    "Grid": "planning.grid",
    "SweepError": "errors",
    "Job": "jobs.job",
    "Plan": "planning.plan",
    "Run": "planning.plan",
    "Sweep": "jobs.sweep_folder",
    "expand": "planning.grid",
    "load": "planning.grid",
    "names": "planning.grid",
    "plan": "planning.plan",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Import the module of a public name when it is first asked for (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'sweeps' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"sweeps.{_HOME[name]}"), name)
