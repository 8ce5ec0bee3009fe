"""Arrays inside `.npz` files, a piece at a time and never unpickled.

A reference batch of ADM holds 10,000 images (2 GB), a sample batch 50,000 (10 GB): they are
streamed.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from experiments.metrics.names import MetricError


def _header(handle: IO[bytes], what: str) -> tuple[tuple[int, ...], np.dtype]:
    try:
        version = npy.read_magic(handle)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = read(handle)
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise MetricError(f"{what} is damaged ({str(error)[:100]})") from None
    if dtype.hasobject or fortran:
        raise MetricError(
            f"{what} is stored as Python objects or in column order; expected plain numbers"
        )
    return shape, dtype


def names(path: str | os.PathLike[str]) -> list[str]:
    """Return the names of the arrays in an `.npz` file.

    Raises:
        MetricError: No such file, or no `.npz`.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise MetricError(f"{path}: no such file; expected an .npz")
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    except zipfile.BadZipFile:
        raise MetricError(f"{path} is no .npz file, or was cut off while it was written") from None


def shape_of(path: str | os.PathLike[str], name: str) -> tuple[int, ...]:
    """Return the shape of one array without reading it."""
    with zipfile.ZipFile(Path(path).expanduser()) as archive, archive.open(f"{name}.npy") as handle:
        return _header(handle, f"{name} in {path}")[0]


def stream_images(
    path: str | os.PathLike[str], name: str = "arr_0", batch: int = 64
) -> Iterator[Tensor]:
    """Yield the images in an `.npz` file as uint8 batches `(B, 3, H, W)`.

    Args:
        path: File with an array `(N, H, W, 3)` of uint8, as ADM's reference and sample batches.
        name: Name of the array.
        batch: Images at a time.

    Raises:
        MetricError: The array is not there, is no uint8 RGB, or ends too early.
    """
    if name not in names(path):
        raise MetricError(
            f"{path} has no images ({name}); it holds {', '.join(names(path)) or 'nothing'}"
        )
    with zipfile.ZipFile(Path(path).expanduser()) as archive, archive.open(f"{name}.npy") as handle:
        shape, dtype = _header(handle, f"{name} in {path}")
        if dtype != np.uint8 or len(shape) != 4 or shape[3] != 3:
            raise MetricError(
                f"{name} in {path} is {dtype} {shape}; expected uint8 images (N, H, W, 3)"
            )
        item = int(np.prod(shape[1:]))
        for start in range(0, shape[0], batch):
            count = min(batch, shape[0] - start)
            try:
                data = handle.read(count * item)
            except (zipfile.BadZipFile, EOFError, zlib.error):
                data = b""
            if len(data) != count * item:
                raise MetricError(
                    f"{path} is damaged: {name} ends before image {start + count} of {shape[0]}"
                )
            array = np.frombuffer(data, dtype=np.uint8).reshape(count, *shape[1:])
            yield torch.from_numpy(array.transpose(0, 3, 1, 2).copy())
