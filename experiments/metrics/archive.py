"""Arrays inside `.npz` files, a piece at a time and never unpickled.

A reference batch of ADM holds 10,000 images (2 GB), a sample batch 50,000 (10 GB): they are
streamed.
"""

from __future__ import annotations

import math
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from experiments.metrics.metric_names import MetricError

# Beyond this many bytes an array must be packed no tighter than this: statistics and images do not
# shrink a hundredfold, and a file of kilobytes must not fill the memory.
_PLAIN = 64 * 2**20
_TIGHTEST = 100


def _header(handle: IO[bytes], what: str) -> tuple[tuple[int, ...], np.dtype]:
    try:
        version = npy.read_magic(handle)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = read(handle)
    except Exception as error:
        # numpy parses headers as Python text: what comes out of a damaged one is any of a dozen.
        raise MetricError(f"{what} is damaged ({_line(error)})") from None
    if any(type(side) is not int or side < 0 for side in shape):
        raise MetricError(f"{what} is damaged (its shape is {shape})")
    if dtype.hasobject or fortran:
        raise MetricError(
            f"{what} is stored as Python objects or in column order; expected plain numbers"
        )
    return shape, dtype


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:100] or type(error).__name__


def read(path: str | os.PathLike[str], wanted: Iterable[str]) -> dict[str, np.ndarray]:
    """Return whole arrays of an `.npz` file.

    Args:
        path: The file.
        wanted: Names of arrays that are in it.

    Raises:
        MetricError: A damaged file, Python objects, or an array packed so tightly that reading it
            would fill the memory.
    """
    found = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for name in wanted:
                info = archive.getinfo(f"{name}.npy")
                if info.file_size > max(_PLAIN, _TIGHTEST * info.compress_size):
                    raise MetricError(
                        f"{path}: {name} would unpack from {info.compress_size} to "
                        f"{info.file_size} bytes, which no array of numbers does"
                    )
                with archive.open(info) as handle:
                    found[name] = npy.read_array(handle, allow_pickle=False)
    except MetricError:
        raise
    except Exception as error:
        raise MetricError(f"{path} is damaged or holds Python objects ({_line(error)})") from None
    return found


def _member(archive: zipfile.ZipFile, path: str | os.PathLike[str], name: str) -> IO[bytes]:
    try:
        return archive.open(f"{name}.npy")
    except Exception as error:
        raise MetricError(f"{path} is damaged ({_line(error)})") from None


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
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        raise MetricError(f"{path} is no .npz file, or was cut off while it was written") from None


def shape_of(path: str | os.PathLike[str], name: str) -> tuple[int, ...]:
    """Return the shape of one array without reading it."""
    path = Path(path).expanduser()
    with zipfile.ZipFile(path) as archive, _member(archive, path, name) as handle:
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
    path = Path(path).expanduser()
    with zipfile.ZipFile(path) as archive, _member(archive, path, name) as handle:
        shape, dtype = _header(handle, f"{name} in {path}")
        if dtype != np.uint8 or len(shape) != 4 or shape[3] != 3:
            raise MetricError(
                f"{name} in {path} is {dtype} {shape}; expected uint8 images (N, H, W, 3)"
            )
        item = math.prod(shape[1:])
        for start in range(0, shape[0], batch):
            count = min(batch, shape[0] - start)
            try:
                data = handle.read(count * item)
            except (zipfile.BadZipFile, EOFError, OSError, ValueError, MemoryError, zlib.error):
                data = b""
            if len(data) != count * item:
                raise MetricError(
                    f"{path} is damaged: {name} ends before image {start + count} of {shape[0]}"
                )
            array = np.frombuffer(data, dtype=np.uint8).reshape(count, *shape[1:])
            yield torch.from_numpy(array.transpose(0, 3, 1, 2).copy())
