"""Diffusion: objectives, samplers and guidance (mathematics only).

An *objective* defines how data are corrupted, what the network predicts and how its output becomes
an estimate `D(x, time)` of the clean image. A *sampler* integrates from noise to data with nothing
but `D`. *Guidance* sits between them and makes one `D` out of several passes. So every sampler and
every guidance works with every objective and every backbone.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "DiffusionError": "diffusion_options",
    "options_of": "diffusion_options",
    "Objective": "objective",
    "Prediction": "objective",
    "create_objective": "objective",
    "Sampler": "samplers",
    "create_sampler": "samplers",
    "Guidance": "guidance",
    "create_guidance": "guidance",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that importing the package needs no torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
