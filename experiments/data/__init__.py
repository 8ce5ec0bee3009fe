"""Data sets by name: pictures in memory, procedural scenes with captions, latents on disk.

Every data set answers `batch(index, draws)` with tensors that depend on the arguments alone, so
that the same run gives the same batches on any number of processes and after any restart.
"""

from routing.lazy import lazily

__getattr__, __dir__, __all__ = lazily(
    __name__,
    {
        "dataset": ("Batch", "Condition", "Dataset", "Prefetch", "Rows", "SampleOrder", "create"),
        "data_options": (
            "DataError",
            "DataOptions",
            "DigitsOptions",
            "FashionOptions",
            "IconsOptions",
            "MnistOptions",
            "ScenesOptions",
            "TorchvisionOptions",
            "parse",
        ),
        "latents_spec": ("LatentsOptions",),
    },
)
