"""Images from a trained model: requests, pipelines, and where samples are kept."""

from experiments.runtime.lazy import lazily

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
__getattr__, __dir__ = lazily(__name__, _HOME)
