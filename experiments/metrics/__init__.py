"""How good the samples are: features, distances, reference statistics (imported on first use)."""

from routing.lazy import lazily

__getattr__, __dir__, __all__ = lazily(
    __name__,
    {
        "eval_options": ("EvalOptions", "METRICS", "MetricError", "Score"),
        "distances": ("Moments", "SingularCovarianceWarning", "frechet_distance"),
        "collect": ("Reference",),
        "features": ("Features", "create_features"),
    },
)
