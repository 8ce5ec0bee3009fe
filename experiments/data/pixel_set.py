"""Data sets whose images fit in memory: kept as uint8, scaled where a batch is made."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from experiments.data.dataset import Batch, Dataset, Rows, to_uint8
from experiments.data.published_files import ImageOptions
from routing.rng import Draws


class PixelSet(Dataset):
    """Images in memory, shifted and scaled by two numbers to mean 0 and `sigma_data`.

    The numbers are the mean and standard deviation of the training pixels. Images smaller than
    the options' `sample_shape` stand in its middle, on black.
    """

    def __init__(
        self, options: ImageOptions, task: str = "class", device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(options, task, device)
        found = options.read()
        self.class_names, self._white = tuple(found.class_names), found.white
        self._source, self._mirrored = options.source, options.mirrored
        digest = hashlib.sha256()
        self._pixels: dict[str, Tensor] = {}
        self._labels: dict[str, Tensor] = {}
        for split, (images, labels) in found.splits.items():
            missing = [self.shape[axis] - images.shape[axis + 1] for axis in (1, 2)]
            around = [(side // 2, side - side // 2) for side in missing]
            pixels, known = np.pad(images, [(0, 0), (0, 0), *around]), labels.astype(np.int64)
            digest.update(pixels.data)
            digest.update(known.data)
            self._pixels[split] = torch.from_numpy(pixels).to(self.device)
            self._labels[split] = torch.from_numpy(known).to(self.device)
        self.sizes = {split: len(labels) for split, labels in self._labels.items()}
        self.fingerprint = found.fingerprint or digest.hexdigest()[:16]
        # Exact, from how often each value occurs.
        parts = self._pixels["train"].cpu().split(4096)
        counts = torch.stack([part.flatten().bincount(minlength=256) for part in parts]).sum(0)
        share, values = counts.double() / counts.sum(), torch.arange(256, dtype=torch.float64)
        self._mean = float((share * values).sum())
        self._std = float((share * (values - self._mean) ** 2).sum().sqrt())
        scaled = (values - self._mean) * (self.sigma_data / self._std)
        self._scaled = scaled.float().to(self.device)

    def batch(
        self,
        index: Tensor,
        draws: Draws | None = None,
        split: str = "train",
        rows: Rows | None = None,
    ) -> Batch:
        """Return images and their labels; without `draws` none is mirrored."""
        self._check(index, split)
        index = index.to(self.device, non_blocking=True)
        x = self._scaled[self._pixels[split][index].long()]
        if draws is not None and self._mirrored:
            flip = draws.uniform("flip", 1).to(self.device).view(-1, 1, 1, 1) < 0.5
            x = torch.where(flip, x.flip(-1), x)
        return Batch(x, self._labels[split][index] if self.task == "class" else None)

    def describe(self) -> dict[str, str]:
        """Return the images' source, where it is said."""
        return {"source": self._source} if self._source else {}

    def to_pixels(self, x: Tensor) -> Tensor:
        """Turn (B, C, H, W) into uint8 RGB (B, 3, H, W); grey has three equal channels."""
        values = x.float() * (self._std / self.sigma_data) + self._mean
        return to_uint8(values * (255 / self._white)).expand(-1, 3, -1, -1).contiguous()
