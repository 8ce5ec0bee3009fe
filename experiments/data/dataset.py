"""What a data set is: batches from indices, pixels from tensors, text from captions."""

from __future__ import annotations

import abc
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.data.data_options import TASKS, DataError, DataOptions, one_of
from experiments.data.specs import parse
from routing.rng import Draws


@dataclass(frozen=True)
class Batch:
    """One batch, on one device.

    Args:
        x: Data as the model sees them, (B, C, H, W) float32.
        y: Class labels, (B,) int64, or None.
        text: Caption embeddings, (B, L, E) float32, or None.
        captions: The captions in words, or None (`Dataset.condition` has them where training
            batches leave them out).
    """

    x: Tensor
    y: Tensor | None = None
    text: Tensor | None = None
    captions: list[str] | None = None

    def rows(self, low: int, high: int) -> Batch:
        """Return the samples `low..high-1` of the batch."""
        part = slice(low, high)
        return Batch(
            self.x[part],
            None if self.y is None else self.y[part],
            None if self.text is None else self.text[part],
            None if self.captions is None else self.captions[part],
        )


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

    Args:
        options: What is known before the data are read; a subclass whose files say more sets
            `shape`, `num_classes` and `text` anew.
        task: `class`, `text` or `none`.
        device: Where batches are made.

    Attributes:
        name: As in `data=`.
        task: `class`, `text` or `none`: what `batch` returns beside `x`.
        shape: (C, H, W) of one sample.
        num_classes: Number of classes; 0 for a data set without labels or another task.
        class_names: One name per class.
        text: (L, E) of caption embeddings, or None.
        sizes: Number of samples per split; None is an endless stream.
        sigma_data: Standard deviation of `x`, as the objective assumes it.
        fingerprint: Changes when the data change; part of a run's identity.
        device: Where batches are made.
        reads_disk: Whether `rows` reads files, so that a prefetch thread pays.
    """

    class_names: tuple[str, ...] = ()
    sizes: dict[str, int | None]
    fingerprint: str
    reads_disk = False

    def __init__(
        self, options: DataOptions, task: str = "class", device: torch.device | str = "cpu"
    ) -> None:
        one_of("task", task, TASKS)
        if task == "text" and options.caption_shape is None:
            raise DataError(
                f"data={options.name} has no captions; use task=class, or data=scenes task=text"
            )
        self.name, self.sigma_data = options.name, options.sigma_data
        self.task, self.device = task, torch.device(device)
        self.shape = options.sample_shape
        self.num_classes = options.class_count if task == "class" else 0
        self.text = options.caption_shape if task == "text" else None

    @property
    def size(self) -> int | None:
        """Number of training samples; None for an endless stream."""
        return self.sizes["train"]

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

    def rows(self, index: Tensor, draws: Draws, split: str = "train") -> Rows:
        """Read what `batch` needs from disk (nothing, for data sets that compute their samples)."""
        return Rows({})

    @abc.abstractmethod
    def batch(
        self, index: Tensor, draws: Draws | None, split: str = "train", rows: Rows | None = None
    ) -> Batch:
        """Return the samples at `index`.

        Args:
            index: (B,) int64 sample indices within the split.
            draws: Random numbers of this step for flips and latent noise, or None.
            split: `train` or `test`.
            rows: What `rows` returned for the same arguments, where it was read ahead.

        Raises:
            DataError: No such split or sample.
        """

    def condition(self, index: Tensor, split: str = "test") -> Condition:
        """Return labels or captions of samples `index` (B,), to ask a model for such."""
        batch = self.batch(index, None, split)
        return Condition(batch.y, batch.text, batch.captions)

    def prompts(self, index: Tensor) -> Condition:
        """Return what to ask a model for, for any number of samples: held-out labels or captions.

        They repeat where the held-out split is smaller, and are training ones where there is none.

        Args:
            index: (B,) int64, from 0 on.
        """
        split = "test" if "test" in self.sizes else "train"
        size = self.sizes[split]
        return self.condition(index if size is None else index % size, split)

    @abc.abstractmethod
    def to_pixels(self, x: Tensor) -> Tensor:
        """Turn model space (B, C, H, W) into uint8 RGB (B, 3, h, w), rounded to nearest."""

    def encode_text(self, captions: Sequence[str]) -> Tensor:
        """Embed captions as (B, L, E) float32.

        Raises:
            DataError: This data set has no captions.
        """
        raise DataError(
            f"data={self.name} has no captions; task=text needs data=scenes or captioned latents"
        )

    def _check(self, index: Tensor, split: str) -> None:
        if split not in self.sizes:
            raise DataError(
                f"data={self.name} has no {split} split: expected {' or '.join(self.sizes)}"
            )
        size = self.sizes[split]
        if index.numel() and index.device.type == "cpu":
            low, high = int(index.min()), int(index.max())
            if low < 0 or (size is not None and high >= size):
                held = "counts from 0" if size is None else f"has {size} samples"
                raise DataError(
                    f"sample {low if low < 0 else high} is outside the {split} split of "
                    f"data={self.name}, which {held}"
                )


def to_uint8(x: Tensor) -> Tensor:
    """Round values in 0..255 to uint8: truncation would bias a Frechet distance."""
    return x.round().clamp(0, 255).to(torch.uint8)


def create(
    options: DataOptions | Mapping[str, Any],
    *,
    task: str = "class",
    device: torch.device | str = "cpu",
) -> Dataset:
    """Return the data set that `options` describe.

    Args:
        options: A dataclass of a NAME_spec.py, or a mapping with its keys and a `name`.
        task: `class`, `text` or `none`: what batches carry beside the data.
        device: Where batches are made.

    Raises:
        DataError: Options, files or task that do not fit, in one sentence.
    """
    chosen = parse(options)
    module, _, name = chosen.dataset.rpartition(".")
    return getattr(importlib.import_module(module), name)(chosen, task, device)
