"""How good the samples are: features, distances, reference statistics (imported on first use)."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "EvalOptions": "eval_options",
    "MetricError": "eval_options",
    "Moments": "distances",
    "frechet_distance": "distances",
    "SingularCovarianceWarning": "distances",
    "Features": "collect",
    "create_features": "features",
    "Reference": "reference",
    "METRICS": "eval_options",
    "Score": "eval_options",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
