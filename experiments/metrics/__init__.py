"""How good the samples are: features, distances, reference statistics (imported on first use)."""

from experiments.runtime.lazy import lazily

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
__getattr__, __dir__ = lazily(__name__, _HOME)
