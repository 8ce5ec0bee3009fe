"""Data sets whose images fit in memory: kept as uint8, scaled where a batch is made."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from sklearn.model_selection import train_test_split
from torch import Tensor

from experiments.data.data_options import DataOptions, SplitOptions
from experiments.data.dataset import Batch, Dataset, Rows, to_uint8
from routing.rng import Draws

#: Images (N, C, h, w) uint8, and their labels (N,).
Split = tuple[np.ndarray, np.ndarray]


class PixelSet(Dataset):
    """Images in memory, shifted and scaled by two numbers to mean 0 and `sigma_data`.

    The numbers are the mean and standard deviation of the training pixels. Images smaller than
    the options' `sample_shape` stand in its middle, on black.

    Args:
        options: Of the data set.
        task: `class` or `none`.
        device: Where images are kept and batches are made.
        splits: `train` and `test`.
        class_names: One name per class.
        white: Largest value of a pixel.
        mirrored: Whether half of the images of a training step are mirrored.
    """

    def __init__(
        self,
        options: DataOptions,
        task: str,
        device: torch.device | str,
        splits: Mapping[str, Split],
        class_names: Sequence[str],
        white: int = 255,
        mirrored: bool = False,
    ) -> None:
        super().__init__(options, task, device)
        self.class_names, self._white, self._mirrored = tuple(class_names), white, mirrored
        digest = hashlib.sha256()
        self._pixels: dict[str, Tensor] = {}
        self._labels: dict[str, Tensor] = {}
        for split, (images, labels) in splits.items():
            missing = [self.shape[axis] - images.shape[axis + 1] for axis in (1, 2)]
            around = [(side // 2, side - side // 2) for side in missing]
            pixels, known = np.pad(images, [(0, 0), (0, 0), *around]), labels.astype(np.int64)
            digest.update(pixels.data)
            digest.update(known.data)
            self._pixels[split] = torch.from_numpy(pixels).to(self.device)
            self._labels[split] = torch.from_numpy(known).to(self.device)
        self.sizes = {split: len(labels) for split, labels in self._labels.items()}
        self.fingerprint = digest.hexdigest()[:16]
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

    def to_pixels(self, x: Tensor) -> Tensor:
        """Turn (B, C, H, W) into uint8 RGB (B, 3, H, W); grey has three equal channels."""
        values = x.float() * (self._std / self.sigma_data) + self._mean
        return to_uint8(values * (255 / self._white)).expand(-1, 3, -1, -1).contiguous()


class GreyImages(PixelSet):
    """Grey images that come as one set and are split here: the same share of every class held out.

    Args:
        options: Of the data set; its `sample_shape` is (1, H, W).
        task: `class` or `none`.
        device: Where the images are kept.
        images: Whole numbers from 0 to `white`, in any shape that is N images of H x W.
        labels: Their classes, (N,).
        white: The largest value of a pixel.
    """

    def __init__(
        self,
        options: SplitOptions,
        task: str,
        device: torch.device | str,
        images: np.ndarray,
        labels: np.ndarray,
        white: int,
    ) -> None:
        halves = train_test_split(
            range(len(labels)),
            test_size=options.test_fraction,
            random_state=options.split_seed,
            stratify=labels,
        )
        # Ascending, so that the split alone, not the library's order, defines sample i.
        chosen = dict(zip(("train", "test"), map(sorted, halves), strict=True))
        pixels = images.astype(np.uint8).reshape(-1, *options.sample_shape)
        splits = {split: (pixels[rows], labels[rows]) for split, rows in chosen.items()}
        names = [str(number) for number in range(options.class_count)]
        super().__init__(options, task, device, splits, names, white)
        digest = hashlib.sha256(images.tobytes() + labels.tobytes())
        digest.update(repr((options, chosen["test"])).encode())
        self.fingerprint = digest.hexdigest()[:16]
