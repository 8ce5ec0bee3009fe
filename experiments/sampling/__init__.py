"""Images from a trained model: requests, pipelines, and where samples are kept."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "SamplingPipeline": "pipeline",
    "generate": "generation",
    "labels_from_seeds": "generation",
    "model_cost": "pipeline",
    "sampling_cost": "pipeline",
    "generate_shards": "sample_store",
    "read_shards": "sample_store",
    "write_npz": "sample_store",
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
