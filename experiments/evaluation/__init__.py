"""Samples of a trained model and how good they are (names are imported on first use)."""

from routing.lazy import lazily

__getattr__, __dir__, __all__ = lazily(
    __name__,
    {
        "distances": ("Moments", "SingularCovarianceWarning", "frechet_distance"),
        "reference": ("Reference",),
        "features": ("Features", "create_features"),
        "pipeline": ("SamplingPipeline",),
        "cost": ("model_cost", "sampling_cost"),
        "generation": ("generate", "labels_from_seeds"),
        "sample_store": ("generate_shards", "read_shards", "write_npz"),
    },
)
