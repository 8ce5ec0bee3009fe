"""Data sets by name: pictures in memory, procedural scenes with captions, latents on disk.

Every data set answers `batch(index, draws)` with tensors that depend on the arguments alone, so
that the same run gives the same batches on any number of processes and after any restart.
"""

from experiments.runtime.lazy import lazily

_HOME = {
    "Batch": "dataset",
    "Condition": "dataset",
    "Dataset": "dataset",
    "Rows": "dataset",
    "create": "dataset",
    "DataError": "data_options",
    "DataOptions": "data_options",
    "DigitsOptions": "digits",
    "FashionOptions": "fashion",
    "IconsOptions": "icons",
    "LatentsOptions": "latents_spec",
    "MnistOptions": "mnist",
    "ScenesOptions": "scenes_spec",
    "TorchvisionOptions": "torchvision",
    "parse": "specs",
    "SampleOrder": "dataset",
    "Prefetch": "dataset",
}
__all__ = sorted(_HOME)
__getattr__, __dir__ = lazily(__name__, _HOME)
