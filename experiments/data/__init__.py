"""Data sets by name: pictures in memory, procedural scenes with captions, latents on disk.

Every data set answers `batch(index, draws)` with tensors that depend on the arguments alone, so
that the same run gives the same batches on any number of processes and after any restart.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "Batch": "dataset",
    "Condition": "dataset",
    "Dataset": "dataset",
    "Rows": "dataset",
    "create": "dataset",
    "DataError": "data_options",
    "DataOptions": "data_options",
    "DigitsOptions": "digits",
    "FashionOptions": "fashion",
    "IconsOptions": "icons",
    "LatentsOptions": "latents_spec",
    "MnistOptions": "mnist",
    "ScenesOptions": "scenes_spec",
    "TorchvisionOptions": "torchvision",
    "parse": "specs",
    "SampleOrder": "dataset",
    "Prefetch": "dataset",
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
