"""The images that are measured: uint8 RGB `(B, 3, H, W)` of data sets, folders and `.npz` files.

Arrays of `.npz` files are read a piece at a time and never unpickled: a reference batch of ADM
holds 10,000 images (2 GB), a sample batch 50,000 (10 GB).
"""

from __future__ import annotations

import contextlib
import math
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.lib import format as npy
from PIL import Image
from torch import Tensor

from experiments.data.data_options import PICTURES, first_line
from experiments.data.picture_sources import eight_bits
from experiments.metrics.eval_options import MetricError

#: Images taken from an endless stream, per split.
ENDLESS = {"train": 20000, "test": 5000}
#: Most images of a split that are measured; larger splits are subsampled evenly.
MOST = 50000
# Beyond this many bytes an array must be packed no tighter than this: statistics and images do not
# shrink a hundredfold, and a file of kilobytes must not fill the memory.
_PLAIN = 64 * 2**20
_TIGHTEST = 100


# --- splits of data sets -------------------------------------------------------------------------


def split_indices(dataset: Any, split: str, limit: int | None = None) -> Tensor:
    """Return the indices of a split that are measured: all, or an even subsample of `limit`."""
    if split not in dataset.sizes or dataset.sizes[split] == 0:
        raise MetricError(
            f"data={dataset.name} has no {split} split to compare with; give "
            "eval.reference=FILE.npz"
        )
    size = dataset.sizes[split]
    if size is None:
        return torch.arange(min(ENDLESS[split], limit or MOST))
    count = min(size, limit or MOST)
    return torch.arange(count) * size // count


def split_images(dataset: Any, split: str, index: Tensor | None = None) -> Iterator[Tensor]:
    """Yield a split, or the samples `index` of it, as uint8 batches of shape `(B, 3, H, W)`."""
    for pixels, _ in _batches(dataset, split, index):
        yield pixels


def labelled_images(dataset: Any, split: str) -> tuple[Tensor, Tensor]:
    """Return images `(N, 3, H, W)` uint8 and labels `(N,)` of a split, on the CPU."""
    pixels, labels = zip(*_batches(dataset, split), strict=True)
    if any(y is None for y in labels):
        raise MetricError(
            f"data={dataset.name} task={dataset.task} has no labels to train a classifier on"
        )
    return torch.cat(pixels).cpu(), torch.cat(labels).cpu()


def _batches(
    dataset: Any, split: str, index: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor | None]]:
    if dataset.cannot_decode:
        raise MetricError(f"scores are taken on pixels: {dataset.cannot_decode}")
    index = split_indices(dataset, split) if index is None else index
    for part in index.split(256):
        # Without draws nothing is flipped, and the noise of latents belongs to the sample alone.
        found = dataset.batch(part, None, split)
        yield dataset.to_pixels(found.x), found.y


# --- arrays in .npz files -------------------------------------------------------------------------


def read_arrays(path: Path, wanted: Iterable[str]) -> dict[str, np.ndarray]:
    """Return whole arrays of an `.npz` file.

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
        raise MetricError(
            f"{path} is damaged or holds Python objects ({first_line(error)[:100]})"
        ) from None
    return found


def array_names(path: Path) -> list[str]:
    """Return the names of the arrays in an `.npz` file."""
    if not path.is_file():
        raise MetricError(f"{path}: no such file; expected an .npz")
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        raise MetricError(f"{path} is no .npz file, or was cut off while it was written") from None


# --- images of no run -----------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], tuple[int, ...]]]:
    """Open the images of an `.npz` file: their bytes `(N, H, W, 3)` uint8, and this shape."""
    present = array_names(path)
    if "arr_0" not in present:
        raise MetricError(
            f"{path} has no images (arr_0); it holds {', '.join(present) or 'nothing'}"
        )
    with zipfile.ZipFile(path) as archive, contextlib.ExitStack() as stack:
        try:
            handle = stack.enter_context(archive.open("arr_0.npy"))
            version = npy.read_magic(handle)
            read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, fortran, dtype = read(handle)
            if any(type(side) is not int or side < 0 for side in shape):
                raise ValueError(f"its shape is {shape}")
        except Exception as error:
            # numpy parses headers as Python text: a damaged one raises any of a dozen types.
            raise MetricError(f"arr_0 in {path} is damaged ({first_line(error)[:100]})") from None
        if dtype != np.uint8 or len(shape) != 4 or shape[3] != 3 or fortran:
            found = "Python objects" if dtype.hasobject else f"{dtype} {shape}"
            raise MetricError(
                f"arr_0 in {path} is {found}{' in column order' if fortran else ''}; expected "
                "uint8 images (N, H, W, 3)"
            )
        yield handle, shape


class Images:
    """Images on disk in order: pictures by name, or an `.npz` as ADM's samples and references."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: list[Path] = []
        if path.is_dir():
            self.files = sorted(p for p in path.iterdir() if p.suffix.lower() in PICTURES)
            if not self.files:
                raise MetricError(
                    f"{path} is neither a run folder nor a folder of pictures "
                    f"({', '.join(s.removeprefix('.') for s in PICTURES)})"
                )
            self.n = len(self.files)
        else:
            with _opened(path) as (_, shape):
                self.n = shape[0]

    def labels(self) -> Tensor | None:
        """Return the classes `(N,)` that ADM's batches carry as `arr_1`, or None."""
        if self.files or "arr_1" not in array_names(self.path):
            return None
        found = read_arrays(self.path, ["arr_1"])["arr_1"]
        if found.dtype.kind not in "iu" or found.shape != (self.n,):
            return None
        return torch.from_numpy(found.astype(np.int64))

    def batches(self, part: range, batch: int = 64) -> Iterator[Tensor]:
        """Yield the images numbered `part` as uint8 batches `(B, 3, H, W)`."""
        if self.files:
            for start in range(part.start, part.stop, batch):
                yield self._pictures(self.files[start : min(start + batch, part.stop)])
            return
        with _opened(self.path) as (handle, shape):
            item = math.prod(shape[1:])
            for first in range(0, min(part.stop, self.n), batch):
                count = min(batch, self.n - first)
                try:
                    data = handle.read(count * item)
                except (zipfile.BadZipFile, EOFError, OSError, ValueError, MemoryError, zlib.error):
                    data = b""
                if len(data) != count * item:
                    raise MetricError(
                        f"{self.path} is damaged: arr_0 ends before image {first + count} of "
                        f"{self.n}"
                    )
                low, high = max(part.start - first, 0), min(part.stop - first, count)
                if low < high:
                    images = np.frombuffer(data, np.uint8).reshape(count, *shape[1:])[low:high]
                    yield torch.from_numpy(images.transpose(0, 3, 1, 2).copy())

    def _pictures(self, files: list[Path]) -> Tensor:
        arrays = []
        for path in (self.files[0], *files):  # the first of all has the size of all
            try:
                with Image.open(path) as picture:
                    arrays.append(np.asarray(eight_bits(picture)))
            except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
                why = first_line(error)[:100]
                raise MetricError(f"{path} is not a readable picture ({why}); remove it") from None
            if arrays[-1].shape != arrays[0].shape:
                h, w = arrays[-1].shape[:2]
                first = arrays[0].shape
                raise MetricError(
                    f"{path} is {w}x{h}, {self.files[0].name} is {first[1]}x{first[0]}; "
                    "all pictures must have one size"
                )
        return torch.from_numpy(np.stack(arrays[1:]).transpose(0, 3, 1, 2).copy())
