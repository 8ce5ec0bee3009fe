"""Images to measure: uint8 RGB `(B, 3, H, W)` of data sets, folders and `.npz` files.

Arrays of `.npz` files are read a piece at a time and never unpickled: a reference batch of ADM
holds 10,000 images (2 GB), a sample batch 50,000 (10 GB).
"""

from __future__ import annotations

import contextlib
import math
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.lib import format as npy
from PIL import Image
from torch import Tensor

from backbones.parsing import check_file
from experiments.data.data_options import PICTURES, first_line
from experiments.data.raw_images import eight_bits
from experiments.options.evaluation import MetricError
from experiments.runtime.files import visible_files
from experiments.runtime.processes import share
from routing.errors import require

#: Images taken from an endless stream, per split.
ENDLESS = {"train": 20000, "test": 5000}
#: Most images of a split that are measured; larger splits are subsampled evenly.
MOST = 50000
#: Under this name `sample.py` shows its images together.
GRID = "grid.png"
# Larger arrays may be compressed by this factor at most: statistics and images do not shrink a
# hundredfold, and a file of a few kilobytes must not fill the memory.
_UNCHECKED_BYTES = 64 * 2**20
_MAX_COMPRESSION = 100


# --- splits of data sets -------------------------------------------------------------------------


def split_indices(dataset: Any, split: str, limit: int | None = None) -> Tensor:
    """Return the indices of a split that are measured: all, or an even subsample of `limit`."""
    require(
        split in dataset.sizes and dataset.sizes[split] != 0,
        f"data={dataset.name} has no {split} split to compare with; give eval.reference=FILE.npz",
        MetricError,
    )
    size = dataset.sizes[split]
    if size is None:
        return torch.arange(min(ENDLESS[split], limit or MOST))
    count = min(size, limit or MOST)
    return torch.arange(count) * size // count


def split_batches(
    dataset: Any, split: str, index: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield a split, or its samples `index`, as uint8 batches (B, 3, H, W) and labels (B,)."""
    require(
        not dataset.cannot_decode,
        f"scores are computed on pixels: {dataset.cannot_decode}",
        MetricError,
    )
    index = split_indices(dataset, split) if index is None else index
    for part in index.split(256):
        # Without draws no image is flipped, and the noise of latents depends on the sample alone.
        batch = dataset.batch(part, None, split)
        yield dataset.to_pixels(batch.x), batch.y


def process_batches(dataset: Any, split: str) -> Iterator[Tensor]:
    """Yield this process's part of a split as uint8 batches of shape `(B, 3, H, W)`."""
    index = split_indices(dataset, split)
    part = share(len(index))
    for pixels, _ in split_batches(dataset, split, index[part.start : part.stop]):
        yield pixels


def whole_split(dataset: Any, split: str) -> tuple[Tensor, Tensor | None]:
    """Return images `(N, 3, H, W)` uint8 and labels `(N,)`, if any, of a split, on the CPU."""
    # Batch by batch: the decoded images of a split of latents do not fit on a GPU.
    pixels, labels = [], []
    for batch_pixels, batch_labels in split_batches(dataset, split):
        pixels.append(batch_pixels.cpu())
        if batch_labels is not None:
            labels.append(batch_labels.cpu())
    return torch.cat(pixels), torch.cat(labels) if labels else None


# --- images on disk -------------------------------------------------------------------------------


@contextlib.contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open an `.npz` file; any error in its content becomes one `MetricError`."""
    require(path.is_file(), f"{path}: no such file; expected an .npz", MetricError)
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except MetricError:
        raise
    except Exception as error:  # zip, zlib and numpy's headers raise a dozen types between them
        why = first_line(error)[:100]
        raise MetricError(
            f"{path} is not a valid .npz file: cut off, damaged or with Python objects ({why})"
        ) from None


def read_arrays(path: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Return the arrays of these names that an `.npz` file has.

    Raises:
        MetricError: A damaged file, Python objects, or an array compressed so strongly that
            reading it would fill the memory.
    """
    arrays = {}
    with _archive(path) as archive:
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if name not in names:
                continue
            require(
                info.file_size <= max(_UNCHECKED_BYTES, _MAX_COMPRESSION * info.compress_size),
                f"{path}: {name} would unpack from {info.compress_size} to "
                f"{info.file_size} bytes, too many for an array of images or statistics",
                MetricError,
            )
            with archive.open(info) as handle:
                arrays[name] = npy.read_array(handle, allow_pickle=False)
    return arrays


def _images_in(archive: zipfile.ZipFile) -> tuple[IO[bytes], tuple[int, ...]]:
    """Return the bytes of an archive's images `(N, H, W, 3)` uint8, and this shape."""
    present = [name.removesuffix(".npy") for name in archive.namelist()]
    require(
        "arr_0" in present,
        f"{archive.filename} has no images (arr_0), which metrics on feature rows (precision, "
        f"recall, kid) need; it holds {', '.join(present) or 'nothing'}",
        MetricError,
    )
    handle = archive.open("arr_0.npy")
    version = npy.read_magic(handle)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = read(handle)
    if dtype != np.uint8 or len(shape) != 4 or shape[3] != 3 or fortran:
        content = "Python objects" if dtype.hasobject else f"{dtype} {shape}"
        if fortran:
            content += " in column order"
        raise MetricError(
            f"arr_0 in {archive.filename} is {content}; expected uint8 images (N, H, W, 3)"
        )
    if any(type(side) is not int or side < 0 for side in shape):
        raise ValueError(f"arr_0 has shape {shape}")
    return handle, shape


class Images:
    """Images on disk in order: pictures by name, or an `.npz` as ADM's samples and references.

    Of a folder that `experiments/sample.py` wrote, these are `samples.npz` or the pictures in
    `png/`; its `grid.png` shows several images.
    """

    def __init__(self, path: Path) -> None:
        if (path / GRID).is_file():
            for name in ("samples.npz", "png"):
                if (path / name).exists():
                    path = path / name
                    break
        self.path, self.files = path, list[Path]()
        if path.is_dir():
            files = [file for file in visible_files(path, "*") if file.name != GRID]
            self.files = [file for file in files if file.suffix.lower() in PICTURES]
            self.n = len(self.files)
            require(
                self.files,
                f"{path} is neither a run folder nor a folder of pictures "
                f"({', '.join(s.removeprefix('.') for s in PICTURES)})",
                MetricError,
            )
        else:
            with _archive(path) as archive:
                self.n = _images_in(archive)[1][0]

    def labels(self) -> Tensor | None:
        """Return the classes `(N,)` that ADM's batches carry as `arr_1`, or None."""
        if self.files:
            return None
        labels = read_arrays(self.path, ["arr_1"]).get("arr_1")
        if labels is None or labels.dtype.kind not in "iu" or labels.shape != (self.n,):
            return None
        return torch.from_numpy(labels.astype(np.int64))

    def batches(self, part: range, batch: int = 64) -> Iterator[Tensor]:
        """Yield the images numbered `part` as uint8 batches `(B, 3, H, W)`."""
        for images in (self._pictures if self.files else self._rows)(part, batch):
            yield torch.from_numpy(images.transpose(0, 3, 1, 2).copy())

    def _rows(self, part: range, batch: int) -> Iterator[np.ndarray]:
        stop = min(part.stop, self.n)
        with _archive(self.path) as archive:
            handle, shape = _images_in(archive)
            for first in range(0, stop, batch):
                count = min(batch, stop - first)
                data = handle.read(count * math.prod(shape[1:]))
                if len(data) != count * math.prod(shape[1:]):
                    raise EOFError(f"arr_0 ends before image {first + count} of {self.n}")
                images = np.frombuffer(data, np.uint8).reshape(count, *shape[1:])
                if first + count > part.start:
                    yield images[max(part.start - first, 0) :]

    def _pictures(self, part: range, batch: int) -> Iterator[np.ndarray]:
        first = _picture(self.files[0]).shape
        for start in range(part.start, part.stop, batch):
            files = self.files[start : min(start + batch, part.stop)]
            arrays = [_picture(path) for path in files]
            for path, (h, w, _) in zip(files, (a.shape for a in arrays), strict=True):
                require(
                    (h, w) == first[:2],
                    f"{path} is {w}x{h}, {self.files[0].name} is {first[1]}x{first[0]}; "
                    "all pictures must have one size",
                    MetricError,
                )
            if arrays:
                yield np.stack(arrays)


def _picture(path: Path) -> np.ndarray:
    try:
        check_file(path)
        with Image.open(path) as picture:
            return np.asarray(eight_bits(picture))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        why = first_line(error)[:100]
        raise MetricError(f"{path} is not a readable picture ({why}); remove it") from None
