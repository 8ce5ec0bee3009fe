"""Base class of data sets, their batches, the order of training samples, and reading ahead.

The order is a keyed permutation per epoch, and its only state is the position: a Feistel network
over the next power of four above the size, iterated until it lands inside (Black and Rogaway,
"Ciphers with arbitrary finite domains", 2002), gives the i-th sample of any epoch in O(1), with
nothing to store, broadcast or restore. It uses integers only, so all devices agree on the order.
"""

from __future__ import annotations

import abc
import functools
import importlib
import itertools
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.data.data_options import TASKS, DataError, DataOptions, parse, require
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


def create(
    options: DataOptions | Mapping[str, Any], *, task: str = "class", device: Device = "cpu"
) -> Dataset:
    """Open the data set of `options`: a dataclass of options, or a mapping with a `name`.

    Raises:
        OptionError: Invalid options.
        DataError: Missing or damaged files, or a task that the data set does not support.
    """
    parsed = parse(options)
    module, _, name = parsed.dataset.rpartition(".")
    return getattr(importlib.import_module(module), name)(parsed, task, device)


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
        if size is not None and not 1 <= size < 1 << 40:
            raise DataError(f"a data set of {size} samples cannot be shuffled; it needs at least 1")
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


# --- reading ahead -------------------------------------------------------------------------------

_AHEAD = 3  # batches that are read before they are needed


@dataclass
class Prefetch:
    """Iterates over the batches of steps `start..stop-1`, each a function of its step alone.

    A thread reads ahead from disk. Its errors are raised when their batch is due. Leaving the loop
    ends the thread. `plan` returns a step's sample indices (on the CPU) and random numbers. A
    `stop` of None is endless.
    """

    dataset: Dataset
    plan: Callable[[int], tuple[Tensor, Draws]]
    start: int = 0
    stop: int | None = None

    def __iter__(self) -> Iterator[Batch]:
        steps = range(self.start, sys.maxsize if self.stop is None else self.stop)
        # If the loop is never closed (an error, a signal), the pool's thread is joined at exit.
        pool = ThreadPoolExecutor(1)
        ahead = iter(steps)
        waiting: deque[Future[Rows]] = deque()
        try:
            for step in steps:
                for read in itertools.islice(ahead, _AHEAD + 1 - len(waiting)):
                    waiting.append(pool.submit(self._read, read))
                yield self.dataset.assemble(waiting.popleft().result(), *self.plan(step), "train")
        finally:
            pool.shutdown(cancel_futures=True)

    def _read(self, step: int) -> Rows:
        rows = self.dataset.rows(*self.plan(step))
        return rows.pin() if self.dataset.device.type == "cuda" else rows
