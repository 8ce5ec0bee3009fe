"""What a data set is, one that fits in memory, the order of its samples, batches read ahead.

The order is a keyed permutation per epoch, whose whole state is the position: a Feistel network
over the next power of four above the size, walked until it lands inside (Black and Rogaway,
"Ciphers with arbitrary finite domains", 2002), gives the i-th sample of any epoch in O(1), with
nothing to store, to broadcast or to restore. Integers only, so every device gives the same order.
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
from experiments.options.fields import Key
from routing.rng import Draws

Device = torch.device | str  # where batches are made, and networks run


@dataclass(frozen=True)
class Batch:
    """One batch, on one device."""

    x: Tensor  # data as the model sees them, (B, C, H, W) float32
    y: Tensor | None = None  # class labels, (B,) int64, or None
    text: Tensor | None = None  # caption embeddings, (B, L, E) float32, or None
    # In words, or None (`Dataset.condition` has them where training batches leave them out)
    captions: list[str] | None = None

    def rows(self, low: int, high: int) -> Batch:
        """Return the samples `low..high-1` of the batch."""
        parts = (self.x, self.y, self.text, self.captions)
        cut: list[Any] = [None if part is None else part[low:high] for part in parts]
        return Batch(*cut)


@dataclass(frozen=True)
class Condition:
    """What a sample is asked to show: a `Batch` without data."""

    y: Tensor | None = None
    text: Tensor | None = None
    captions: list[str] | None = None


@dataclass(frozen=True)
class Rows:
    """What was read from disk for one batch, before anything is computed from it."""

    tensors: dict[str, Tensor]
    captions: list[str] | None = None

    def pin(self) -> Rows:
        """Return the rows in page-locked memory, so that copies overlap with work."""
        return Rows({k: v.pin_memory() for k, v in self.tensors.items()}, self.captions)


class Dataset(abc.ABC):
    """A data set whose samples are functions of (split, index, draws).

    The `options` say what is known before the data are read; a subclass whose files say more sets
    `shape`, `num_classes` and `text` anew in `_open`. The `task` is `class`, `text` or `none`: what
    `batch` returns beside `x`. Batches are made on the `device`.
    """

    options: DataOptions
    name: str  # as in `data=`
    shape: tuple[int, int, int]  # (C, H, W) of one sample
    num_classes: int  # 0 for a data set without labels or another task
    class_names: tuple[str, ...] = ()
    text: tuple[int, int] | None  # (L, E) of caption embeddings, or None
    sizes: dict[str, int | None]  # samples per split; None is an endless stream
    sigma_data: float  # standard deviation of `x`, as the objective assumes it
    fingerprint: str  # changes when the data change; part of a run's identity
    reads_disk = False  # whether `rows` reads files, so that a prefetch thread pays

    def __init__(self, options: DataOptions, task: str = "class", device: Device = "cpu") -> None:
        Key(among=TASKS).check("task", task, DataError)
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
        """Read what the options name, or what of it stays in memory; here, nothing."""
        self.sizes = {}

    @property
    def size(self) -> int | None:
        """Number of training samples; None for an endless stream."""
        return self.sizes["train"]

    @property
    def pixels_fingerprint(self) -> str:
        """Changes when the pictures of a split change, also where the data stay."""
        return self.fingerprint

    @property
    def cannot_decode(self) -> str:
        """Why `to_pixels` does not work here, in one sentence; empty where it does."""
        return ""

    @property
    def can_decode(self) -> bool:
        """Whether `to_pixels` works here."""
        return not self.cannot_decode

    def describe(self) -> dict[str, Any]:
        """Return what else sampling must know where the data are not, JSON-able."""
        return {}

    def rows(self, index: Tensor, draws: Draws | None, split: str = "train") -> Rows:
        """Read what `batch` needs from disk (nothing, for data sets that compute their samples)."""
        return Rows({})

    def assemble(self, rows: Rows, index: Tensor, draws: Draws | None, split: str) -> Batch:
        """Return the batch of what `rows` has read for the same arguments."""
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
        """Return labels or captions of samples `index` (B,), to ask a model for such."""
        batch = self.batch(index, None, split)
        return Condition(batch.y, batch.text, batch.captions)

    def prompts(self, index: Tensor) -> Condition:
        """Return held-out labels or captions to ask a model for, of samples `index` (B,) from 0 on.

        They repeat where the held-out split is smaller, and are training ones where there is none.
        """
        split = "test" if "test" in self.sizes else "train"
        size = self.sizes[split]
        return self.condition(index if size is None else index % size, split)

    @abc.abstractmethod
    def to_pixels(self, x: Tensor) -> Tensor:
        """Turn model space (B, C, H, W) into uint8 RGB (B, 3, h, w), rounded to nearest."""

    def encode_text(self, captions: Sequence[str]) -> Tensor:
        """Embed captions as (B, L, E) float32; `DataError` if this data set has none."""
        raise DataError(
            f"data={self.name} has no captions; task=text needs data=scenes or captioned latents"
        )

    def _check(self, index: Tensor, split: str) -> None:
        if split not in self.sizes:
            known = " or ".join(self.sizes)
            raise DataError(f"data={self.name} has no {split} split: expected {known}")
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
    """Return the data set that `options` describe.

    `options` is a dataclass of options, or a mapping with its keys and a `name`;
    `task` and `device` are those of `Dataset`.

    Raises:
        DataError: Options, files or task that do not fit, in one sentence.
    """
    chosen = parse(options)
    module, _, name = chosen.dataset.rpartition(".")
    return getattr(importlib.import_module(module), name)(chosen, task, device)


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
    """Which sample comes at a position of an endless training stream.

    Another seed is another order; a stream without a `size` is endless and needs no shuffling.

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
        # Where it is small, an epoch's order is kept: a walk in each step takes milliseconds.
        self._epoch = functools.lru_cache(2)(self._whole)

    def lookup(self, positions: Tensor) -> Tensor:
        """Return the samples, `0..size-1`, at `positions`, every sample once per epoch.

        Both are int64 of one shape, any; positions are counted over the whole run, from 0 on.
        """
        if self.size is None:
            return positions
        epoch = torch.div(positions, self.size, rounding_mode="floor")
        place = positions - epoch * self.size
        if self.size <= _SMALL and positions.device.type == "cpu" and positions.numel():
            first, last = int(epoch.min()), int(epoch.max())
            if last - first <= 1:
                return torch.stack([self._epoch(first), self._epoch(last)])[epoch - first, place]
        return self._walk(place, epoch)

    def _whole(self, epoch: int) -> Tensor:
        return self._walk(torch.arange(self.size or 0), torch.tensor(epoch))

    def _walk(self, value: Tensor, epoch: Tensor) -> Tensor:
        value = self._permute(value, epoch)
        while bool((outside := value >= (self.size or 0)).any()):
            value = torch.where(outside, self._permute(value, epoch), value)
        return value

    def _permute(self, value: Tensor, epoch: Tensor) -> Tensor:
        mask = (1 << self._half) - 1
        # Hashed one after the other, so that (seed, epoch) and (seed + 1, epoch - 1) differ.
        key = _mix(_mix((epoch + self._key) & _WORD) ^ ((epoch >> 32) & _WORD))
        left, right = value >> self._half, value & mask
        for step in range(_ROUNDS):
            key = _mix((key + 0x6A09E667 + step) & _WORD)
            left, right = right, left ^ (_mix((right + key) & _WORD) & mask)
        return (left << self._half) | right


# --- reading ahead -------------------------------------------------------------------------------

_AHEAD = 3  # batches that may wait


@dataclass
class Prefetch:
    """The batches of steps `start..stop-1`, each a function of its step alone.

    What they read from disk is read ahead by a thread. Its errors are raised where the batch is
    asked for. Leaving the loop ends the thread. `plan` gives a step's sample indices (on the CPU)
    and its random numbers, a `stop` of None is endless.
    """

    dataset: Dataset
    plan: Callable[[int], tuple[Tensor, Draws]]
    start: int = 0
    stop: int | None = None

    def __iter__(self) -> Iterator[Batch]:
        steps = range(self.start, sys.maxsize if self.stop is None else self.stop)
        # A loop that is never left (an error, a signal): the pool's thread is joined at exit.
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
