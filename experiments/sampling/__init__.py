"""Images from a trained model: what was asked for, its passes, where the samples are kept."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "generate": "generation",
    "labels_from_seeds": "generation",
    "model_cost": "sampling_cost",
    "sampling_cost": "sampling_cost",
    "generate_shards": "shards",
    "read_shards": "shards",
    "write_npz": "shards",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that importing the package needs no torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value  # also where importing a submodule has put it under this name
    return value


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
