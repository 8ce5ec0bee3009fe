"""Images that no run of ours made: folders of pictures and `.npz` batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from experiments.data.picture_files import eight_bits
from experiments.metrics import archive
from experiments.metrics.metric_names import MetricError

_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


class Images:
    """A set of images on disk, in a fixed order.

    Args:
        path: A folder of pictures (sorted by name), or an `.npz` with `arr_0` `(N, H, W, 3)`.

    Raises:
        MetricError: Nothing there, or nothing that is an image.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: list[Path] = []
        if path.is_dir():
            self.files = sorted(p for p in path.iterdir() if p.suffix.lower() in _SUFFIXES)
            if not self.files:
                raise MetricError(
                    f"{path} is neither a run folder nor a folder of pictures "
                    f"({', '.join(s.removeprefix('.') for s in _SUFFIXES)})"
                )
            self.n = len(self.files)
        else:
            if "arr_0" not in archive.names(path):
                raise MetricError(f"{path} has no images (arr_0); give a sample batch or a folder")
            shape = archive.shape_of(path, "arr_0")
            if len(shape) != 4:
                raise MetricError(f"arr_0 in {path} has shape {shape}; expected (N, H, W, 3)")
            self.n = shape[0]

    def labels(self) -> Tensor | None:
        """Return the classes `(N,)` that ADM's batches carry as `arr_1`, or None."""
        if self.files or "arr_1" not in archive.names(self.path):
            return None
        found = archive.read(self.path, ["arr_1"])["arr_1"]
        if found.dtype.kind not in "iu" or found.shape != (self.n,):
            return None
        return torch.from_numpy(found.astype(np.int64))

    def batches(self, part: range, batch: int = 64) -> Iterator[Tensor]:
        """Yield the images numbered `part` as uint8 batches `(B, 3, H, W)`."""
        if self.files:
            for start in range(part.start, part.stop, batch):
                yield self._pictures(self.files[start : min(start + batch, part.stop)])
            return
        first = 0
        for images in archive.stream_images(self.path, batch=batch):
            low, high = max(part.start - first, 0), min(part.stop - first, len(images))
            if low < high:
                yield images[low:high]
            first += len(images)

    def _pictures(self, files: list[Path]) -> Tensor:
        from PIL import Image

        arrays = []
        for path in files:
            try:
                with Image.open(path) as picture:
                    arrays.append(np.asarray(eight_bits(picture)))
            except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
                raise MetricError(f"{path} is not a readable picture; remove it") from None
            if arrays[-1].shape != arrays[0].shape:
                h, w = arrays[-1].shape[:2]
                first = arrays[0].shape
                raise MetricError(
                    f"{path} is {w}x{h}, {files[0].name} is {first[1]}x{first[0]}; "
                    "all pictures must have one size"
                )
        return torch.from_numpy(np.stack(arrays).transpose(0, 3, 1, 2).copy())
