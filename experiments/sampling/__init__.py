"""Images from a trained model: requests, pipelines, and where samples are kept."""

from routing.lazy import lazily

__getattr__, __dir__, __all__ = lazily(
    __name__,
    {
        "pipeline": ("SamplingPipeline", "model_cost", "sampling_cost"),
        "generation": ("generate", "labels_from_seeds"),
        "sample_store": ("generate_shards", "read_shards", "write_npz"),
    },
)
