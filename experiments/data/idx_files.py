"""IDX, the format of MNIST's files (LeCun, Cortes and Burges): a magic number, sizes, bytes."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from experiments.data.data_options import DataError

#: The four files of a data set that is published as MNIST was: images and labels of each split.
NAMES = {
    split: (f"{start}-images-idx3-ubyte", f"{start}-labels-idx1-ubyte")
    for split, start in (("train", "train"), ("test", "t10k"))
}
# More than any of them unpacks to (EMNIST's largest: 547 MB), so that no small file fills the
# memory.
_MOST = 1 << 30


def content(path: Path) -> bytes:
    """Return what a file holds, unpacked if its name ends in `.gz`.

    Raises:
        DataError: It cannot be read, or is cut short.
    """
    try:
        if path.suffix != ".gz":
            return path.read_bytes()
        with gzip.open(path) as file:
            return file.read(_MOST)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged or cannot be read ({error})") from None


def images_and_labels(images: bytes, labels: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Return images (N, 1, H, W) and labels (N,), uint8, of one split's two files.

    Args:
        images: Content of the file of images.
        labels: Content of the file of labels.
        where: What they are, for the message.

    Raises:
        DataError: They are no such files, cut short, or of different lengths.
    """
    pixels, classes = array(images, 3, where), array(labels, 1, where)
    if len(pixels) != len(classes):
        raise DataError(f"{where}: {len(pixels)} images and {len(classes)} labels")
    return pixels[:, None], classes


def array(data: bytes, dimensions: int, where: str) -> np.ndarray:
    """Return the bytes of an IDX file as an array; nothing is copied.

    Raises:
        DataError: Another type or number of dimensions, or more or fewer bytes than the sizes say.
    """
    head = 4 + 4 * dimensions
    if len(data) < head or data[:4] != bytes([0, 0, 8, dimensions]):
        raise DataError(f"{where} is no IDX file of bytes in {dimensions} dimensions")
    sizes = struct.unpack_from(f">{dimensions}I", data, 4)
    if len(data) != head + math.prod(sizes):
        expected = f"{math.prod(sizes)} of {'x'.join(map(str, sizes))}"
        raise DataError(f"{where} holds {len(data) - head} bytes, its head says {expected}")
    return np.frombuffer(data, np.uint8, offset=head).reshape(sizes)
