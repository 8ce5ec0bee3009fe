"""What a data set is: batches from indices, pixels from tensors, text from captions."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from experiments.data.data_options import TASKS, DataError
from routing.errors import suggest

if TYPE_CHECKING:
    from routing.rng import Draws


@dataclass(frozen=True)
class Batch:
    """One batch, on one device.

    Args:
        x: Data as the model sees them, (B, C, H, W) float32.
        y: Class labels, (B,) int64, or None.
        text: Caption embeddings, (B, L, E) float32, or None.
        captions: The captions in words, or None (`Dataset.condition` has them where training
            batches
            leave them out).
    """

    x: Tensor
    y: Tensor | None = None
    text: Tensor | None = None
    captions: list[str] | None = None

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on another device."""
        return Batch(
            self.x.to(device, non_blocking=True),
            None if self.y is None else self.y.to(device, non_blocking=True),
            None if self.text is None else self.text.to(device, non_blocking=True),
            self.captions,
        )

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

    name: str
    shape: tuple[int, int, int]
    num_classes: int = 0
    class_names: tuple[str, ...] = ()
    text: tuple[int, int] | None = None
    sizes: dict[str, int | None]
    fingerprint: str
    reads_disk = False

    def __init__(self, task: str, sigma_data: float, device: torch.device | str) -> None:
        if task not in TASKS:
            raise DataError(
                f"task={task}: expected one of {', '.join(TASKS)}{suggest(task, TASKS)}"
            )
        self.task = task
        self.sigma_data = sigma_data
        self.device = torch.device(device)

    @property
    def size(self) -> int | None:
        """Number of training samples; None for an endless stream."""
        return self.sizes["train"]

    @property
    def can_decode(self) -> bool:
        """Whether `to_pixels` works here; `cannot_decode` says why not."""
        return not self.cannot_decode

    @property
    def cannot_decode(self) -> str:
        """Why there are no pixels, in one sentence; empty where there are."""
        return ""

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
            draws: Random numbers of this step for flips and latent noise; may be None where there
            are none.
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
        if index.numel() and size is not None and index.device.type == "cpu":
            low, high = int(index.min()), int(index.max())
            if low < 0 or high >= size:
                raise DataError(
                    f"sample {low if low < 0 else high} is outside the {split} split of "
                    f"data={self.name}, "
                    f"which has {size} samples"
                )


def to_uint8(x: Tensor) -> Tensor:
    """Round values in 0..255 to uint8: truncation would bias a Frechet distance."""
    return x.round().clamp(0, 255).to(torch.uint8)
