"""Data sets and their batches, images in memory, and the order of training samples.

The order is a keyed permutation per epoch, and its only state is the position: a Feistel network
over the next power of four above the size, iterated until it lands inside (Black and Rogaway,
"Ciphers with arbitrary finite domains", 2002), gives the i-th sample of any epoch in O(1), with
nothing to store, broadcast or restore. It uses integers only, so all devices agree on the order.
"""

from __future__ import annotations

import abc
import functools
import hashlib
import math
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.data.data_options import TASKS, DataError, DataOptions, require
from experiments.data.image_options import ImageOptions
from experiments.data.registry import parse
from routing.errors import one_of
from routing.rng import Draws

Device = torch.device | str


@dataclass(frozen=True)
class Batch:
    """One batch on one device."""

    x: Tensor  # data in model space, (B, C, H, W) float32
    y: Tensor | None = None  # class labels, (B,) int64, or None
    text: Tensor | None = None  # caption embeddings, (B, L, E) float32, or None
    # Captions as text, or None. Training batches may omit them; `Dataset.condition` has them.
    captions: list[str] | None = None

    def rows(self, low: int, high: int) -> Batch:
        """Return the samples `low..high-1` of the batch."""
        return Batch(
            self.x[low:high],
            None if self.y is None else self.y[low:high],
            None if self.text is None else self.text[low:high],
            None if self.captions is None else self.captions[low:high],
        )


@dataclass(frozen=True)
class Condition:
    """Class labels or captions to condition on: a `Batch` without data."""

    y: Tensor | None = None
    text: Tensor | None = None
    captions: list[str] | None = None


@dataclass(frozen=True)
class Rows:
    """Values read from disk for one batch, before any computation."""

    tensors: dict[str, Tensor]
    captions: list[str] | None = None

    def pin(self) -> Rows:
        """Return the rows in page-locked memory, so that copies overlap with work."""
        return Rows({k: v.pin_memory() for k, v in self.tensors.items()}, self.captions)


class Dataset(abc.ABC):
    """A data set whose samples are functions of (split, index, draws).

    Args:
        options: Describe the data before they are read. A subclass whose files contain more
            overrides `shape`, `num_classes` and `text` in `_open`.
        task: `class`, `text` or `none`: what `batch` returns besides `x`.
        device: Where batches are made.
    """

    options: DataOptions
    name: str  # as in `data=`
    shape: tuple[int, int, int]  # (C, H, W) of one sample
    num_classes: int  # 0 without labels or with another task
    class_names: tuple[str, ...] = ()
    text: tuple[int, int] | None  # (L, E) of caption embeddings, or None
    sizes: dict[str, int | None]  # samples per split; None for an endless stream
    sigma_data: float  # standard deviation of `x` that the objective assumes
    fingerprint: str  # changes with the data; part of a run's identity
    reads_disk = False  # whether `rows` reads files, so that prefetching helps

    def __init__(self, options: DataOptions, task: str = "class", device: Device = "cpu") -> None:
        one_of("task", task, TASKS, DataError)
        require(
            task != "text" or options.caption_shape is not None,
            f"data={options.name} has no captions; use task=class, or data=scenes task=text",
        )
        self.options, self.name, self.sigma_data = options, options.name, options.sigma_data
        self.task, self.device = task, torch.device(device)
        self.shape = options.sample_shape
        self.num_classes = options.class_count if task == "class" else 0
        self.text = options.caption_shape if task == "text" else None
        self._open()

    def _open(self) -> None:
        """Open the data and set `sizes`; data in memory are read here."""
        self.sizes = {}

    @property
    def size(self) -> int | None:
        """Number of training samples; None for an endless stream."""
        return self.sizes["train"]

    @property
    def pixels_fingerprint(self) -> str:
        """Changes with the decoded images of a split, even if the stored data stay the same."""
        return self.fingerprint

    @property
    def cannot_decode(self) -> str:
        """Why `to_pixels` is unavailable here, in one sentence; empty if it is available."""
        return ""

    @property
    def can_decode(self) -> bool:
        """Whether `to_pixels` is available here."""
        return not self.cannot_decode

    def describe(self) -> dict[str, Any]:
        """Return what sampling needs on a machine without the data, as JSON values."""
        return {}

    def rows(self, index: Tensor, draws: Draws | None, split: str = "train") -> Rows:
        """Read what `batch` needs from disk (nothing for data that are computed or in memory)."""
        return Rows({})

    def assemble(self, rows: Rows, index: Tensor, draws: Draws | None, split: str) -> Batch:
        """Return the batch of the `rows` that were read for the same arguments."""
        return self.batch(index, draws, split)

    @abc.abstractmethod
    def batch(self, index: Tensor, draws: Draws | None = None, split: str = "train") -> Batch:
        """Return the samples at `index`.

        Args:
            index: (B,) int64 sample indices within the split.
            draws: Random numbers of this step for flips and latent noise, or None.
            split: `train` or `test`.

        Raises:
            DataError: No such split or sample.
        """

    def condition(self, index: Tensor, split: str = "test") -> Condition:
        """Return labels or captions of samples `index` (B,), to condition a model on them."""
        batch = self.batch(index, None, split)
        return Condition(batch.y, batch.text, batch.captions)

    def prompts(self, index: Tensor) -> Condition:
        """Return held-out labels or captions of samples `index` (B,), to condition a model on them.

        They repeat beyond the size of the held-out split. Without one, training samples are used.
        """
        split = "test" if "test" in self.sizes else "train"
        size = self.sizes[split]
        return self.condition(index if size is None else index % size, split)

    @abc.abstractmethod
    def to_pixels(self, x: Tensor) -> Tensor:
        """Decode model space (B, C, H, W) to uint8 RGB (B, 3, h, w), rounded to nearest."""

    def encode_text(self, captions: Sequence[str]) -> Tensor:
        """Embed captions as (B, L, E) float32; `DataError` for data without captions."""
        raise DataError(
            f"data={self.name} has no captions; task=text needs data=scenes or captioned latents"
        )

    def _check(self, index: Tensor, split: str) -> None:
        if split not in self.sizes:
            expected = " or ".join(self.sizes)
            raise DataError(f"data={self.name} has no {split} split: expected {expected}")
        if index.numel() and index.device.type == "cpu":
            size, low, high = self.sizes[split], int(index.min()), int(index.max())
            if not 0 <= low <= high < (size or math.inf):
                raise DataError(
                    f"samples {low} to {high} of the {split} split of data={self.name}, which "
                    f"holds {size or 'endless'} samples, counted from 0"
                )


def to_uint8(x: Tensor) -> Tensor:
    """Round values in 0..255 to uint8: truncation would bias a Frechet distance."""
    return x.round().clamp(0, 255).to(torch.uint8)


class PixelSet(Dataset):
    """Images in memory, shifted and scaled to mean 0 and standard deviation `sigma_data`.

    Mean and standard deviation are those of the training pixels. Images smaller than the options'
    `sample_shape` are centred on black.
    """

    options: ImageOptions

    def _open(self) -> None:
        class_count = self.options.describe()["num_classes"]
        require(
            class_count or self.task != "class",
            f"data={self.name} has no classes here; use task=none guidance=none",
        )
        self.num_classes = class_count if self.task == "class" else 0
        content = self.options.read()
        self.class_names, self._white = tuple(content.class_names), content.white
        digest = hashlib.sha256()
        self._pixels: dict[str, Tensor] = {}
        self._labels: dict[str, Tensor] = {}
        self.sizes = {}
        for split, (images, label_values) in content.splits.items():
            labels = np.asarray(label_values)  # may be a list or a tensor
            # Unlabelled images have the label 0, which no batch contains.
            self._check_split(split, images, labels, max(1, class_count))
            pixels, labels = self._pad(images), labels.astype(np.int64)
            digest.update(pixels.data)
            digest.update(labels.data)
            self._pixels[split] = torch.from_numpy(pixels).to(self.device)
            self._labels[split] = torch.from_numpy(labels).to(self.device)
            self.sizes[split] = len(labels)
        self.fingerprint = content.fingerprint or digest.hexdigest()[:16]
        self._set_scale()

    def _check_split(
        self, split: str, images: np.ndarray, labels: np.ndarray, class_count: int
    ) -> None:
        """Refuse images and labels of another type, shape or range than the options describe."""
        classes = np.unique(labels).tolist()
        allowed = range(class_count)
        require(
            images.dtype == np.uint8
            and images.shape[:-2] == (*labels.shape, self.shape[0])
            and images.shape[-2] <= self.shape[-2]
            and images.shape[-1] <= self.shape[-1]
            and set(classes) <= set(allowed),
            f"data={self.name}: for {split}, read() returned {images.dtype} images of shape "
            f"{images.shape} with labels {labels.shape}, {classes[:1]} to {classes[-1:]}; "
            f"expected N of uint8 {self.shape}, or smaller, and N labels below {class_count}",
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
            f"data={self.name}: read() returned no training images, or all their pixels are equal; "
            "expected images that differ",
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


def create(
    options: DataOptions | Mapping[str, Any], *, task: str = "class", device: Device = "cpu"
) -> Dataset:
    """Open the data set of `options`: a dataclass of options, or a mapping with a `name`.

    Raises:
        OptionError: Invalid options.
        DataError: Missing or damaged files, or a task that the data set does not support.
    """
    parsed = parse(options)
    return pkgutil.resolve_name(parsed.dataset)(parsed, task, device)


# --- the order of samples -----------------------------------------------------------------------

_WORD = 0xFFFFFFFF
_ROUNDS = 6
_SMALL = 1 << 16


def _mix(value: Tensor) -> Tensor:
    """Hash 32-bit words in int64; constants below 2^31 keep every product from overflowing."""
    value = ((value ^ (value >> 16)) * 0x45D9F3B) & _WORD
    value = ((value ^ (value >> 15)) * 0x2C1B3C6D) & _WORD
    value = ((value ^ (value >> 13)) * 0x297A2D39) & _WORD
    return value ^ (value >> 16)


class SampleOrder:
    """Maps positions of an endless training stream to samples.

    Each seed gives another order. Without a `size` the stream itself is endless and not shuffled.

    Raises:
        DataError: The data set is empty.
    """

    def __init__(self, seed: int, size: int | None) -> None:
        require(
            size is None or 1 <= size < 1 << 40,
            f"a data set of {size} samples cannot be shuffled; it needs at least 1",
        )
        self.seed = int(seed)
        self.size = size
        halves = torch.tensor([self.seed & _WORD, (self.seed >> 32) & _WORD])
        self._key = int(_mix(_mix(halves[:1]) ^ halves[1:]))
        # Small domains make a weak cipher: 6 bits at least.
        self._half = 3 if size is None else max(3, (max(size - 1, 1).bit_length() + 1) // 2)
        # For small data sets the order of an epoch is cached: computing it takes milliseconds.
        self._cached_epoch = functools.lru_cache(2)(self._epoch_order)

    def lookup(self, positions: Tensor) -> Tensor:
        """Return the samples, `0..size-1`, at `positions`; each sample occurs once per epoch.

        Both are int64 of the same, arbitrary shape. Positions count over the whole run from 0.
        """
        if self.size is None:
            return positions
        epoch = torch.div(positions, self.size, rounding_mode="floor")
        position_in_epoch = positions - epoch * self.size
        if self.size <= _SMALL and positions.device.type == "cpu" and positions.numel():
            first, last = int(epoch.min()), int(epoch.max())
            if last - first <= 1:
                orders = torch.stack([self._cached_epoch(first), self._cached_epoch(last)])
                return orders[epoch - first, position_in_epoch]
        return self._walk(position_in_epoch, epoch)

    def _epoch_order(self, epoch: int) -> Tensor:
        return self._walk(torch.arange(self.size or 0), torch.tensor(epoch))

    def _walk(self, value: Tensor, epoch: Tensor) -> Tensor:
        value = self._permute(value, epoch)
        outside = value >= (self.size or 0)
        while bool(outside.any()):
            value = torch.where(outside, self._permute(value, epoch), value)
            outside = value >= (self.size or 0)
        return value

    def _permute(self, value: Tensor, epoch: Tensor) -> Tensor:
        mask = (1 << self._half) - 1
        # Hashed in sequence, so that (seed, epoch) and (seed + 1, epoch - 1) differ.
        key = _mix(_mix((epoch + self._key) & _WORD) ^ ((epoch >> 32) & _WORD))
        high, low = value >> self._half, value & mask
        for step in range(_ROUNDS):
            key = _mix((key + 0x6A09E667 + step) & _WORD)
            high, low = low, high ^ (_mix((low + key) & _WORD) & mask)
        return (high << self._half) | low
