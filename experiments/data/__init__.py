"""Data sets: digits (embedded), scenes (procedural, captioned), latents (ImageNet, COCO).

Every data set answers `batch(index, draws)` with tensors that depend on the arguments alone, so
that the same run gives
the same batches on any number of processes and after any restart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from experiments.data.data_options import (
        DataError,
        DataOptions,
        DigitsOptions,
        LatentsOptions,
        ScenesOptions,
        parse,
    )
    from experiments.data.dataset import Batch, Condition, Dataset, Rows
    from experiments.data.factory import create
    from experiments.data.prefetch import Prefetch
    from experiments.data.sample_order import Order

_HOME = {
    "Batch": "dataset",
    "Condition": "dataset",
    "Dataset": "dataset",
    "Rows": "dataset",
    "create": "factory",
    "DataError": "data_options",
    "DataOptions": "data_options",
    "DigitsOptions": "data_options",
    "LatentsOptions": "data_options",
    "ScenesOptions": "data_options",
    "parse": "data_options",
    "Order": "sample_order",
    "Prefetch": "prefetch",
}

__all__ = [
    "Batch",
    "Condition",
    "DataError",
    "DataOptions",
    "Dataset",
    "DigitsOptions",
    "LatentsOptions",
    "Order",
    "Prefetch",
    "Rows",
    "ScenesOptions",
    "create",
    "parse",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for, so that `--help` needs no torch."""
    import importlib

    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"experiments.data.{_HOME[name]}")
    value = getattr(module, name)
    globals()[name] = value
    return value
