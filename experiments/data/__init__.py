"""Data sets by name: images in memory, procedural scenes with captions, latents on disk.

Every data set answers `batch(index, draws)` with tensors that depend on the arguments alone, so
that the same run gets the same batches on any number of processes and after any restart.
"""

from routing.lazy import lazily

__getattr__, __dir__, __all__ = lazily(
    __name__,
    {
        "dataset": ("Batch", "Condition", "Dataset", "Rows", "SampleOrder", "create"),
        "data_options": ("DataError", "DataOptions"),
        "image_options": (
            "DigitsOptions",
            "FashionOptions",
            "MnistOptions",
            "ScenesOptions",
            "TorchvisionOptions",
        ),
        "latent_options": ("LatentsOptions",),
        "picture_folder": ("FolderOptions",),
        "prefetch": ("Prefetch",),
        "registry": ("parse",),
    },
)
