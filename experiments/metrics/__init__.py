"""How good the samples are: features, distances, reference statistics (imported on first use)."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "EvalOptions": "eval_options",
    "MetricError": "eval_options",
    "Moments": "moments",
    "frechet_distance": "frechet",
    "SingularCovarianceWarning": "frechet",
    "Features": "features",
    "create_features": "features",
    "Reference": "reference",
    "METRICS": "metric_names",
    "Score": "metric_names",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
