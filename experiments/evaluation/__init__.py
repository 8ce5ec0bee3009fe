"""Samples of a trained model and how good they are (names are imported on first use).

In the order in which an evaluation runs through them, each built on those before it:

    trained_model, weak_model          weights of a run, a checkpoint or an exported file
    guided_denoiser, generation        from seeds to images; `cost`: what one image costs
    pipeline                           model, objective, sampler and guidance in one object
    sample_store, sample_batches       samples on disk, and batch by batch; both can be resumed
    images                             images of data sets, folders and .npz files
    published_networks, small_networks the networks behind feature extractors
    features                           extractors by name: from images to feature vectors
    distances, collect                 distances of feature vectors; their statistics over batches
    reference                          the same statistics of real images
    heldout, heldout_loss              the model's own loss on held-out images
    meters, scoring                    from all of these to scores
    headline                           the six scores that a run prints

`experiments/sample.py` begins in `sample_command`, `experiments/evaluate.py` in `evaluate_command`.
"""

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
