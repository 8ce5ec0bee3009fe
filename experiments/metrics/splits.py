"""Real images of a data set, as the metrics see them: 8-bit RGB in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from experiments.metrics.metric_names import MetricError

#: Images taken from an endless stream, per split.
ENDLESS = {"train": 20000, "test": 5000}
#: Most images of a split that a metric looks at; larger splits are thinned evenly.
MOST = 50000


def indices(dataset: Any, split: str, limit: int | None = None) -> Tensor:
    """Return the sample indices that stand for a split: all of them, or an even selection.

    Args:
        dataset: A data set.
        split: `train` or `test`.
        limit: Take at most this many.

    Raises:
        MetricError: The data set has no such split.
    """
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


def images(
    dataset: Any, split: str, index: Tensor | None = None, batch: int = 256
) -> Iterator[Tensor]:
    """Yield a split as uint8 batches of shape `(B, 3, H, W)`.

    Args:
        dataset: A data set.
        split: `train` or `test`.
        index: Which samples; None: those of `indices`.
        batch: Images at a time.

    Raises:
        MetricError: No such split, or the data cannot be turned into pixels here.
    """
    for pixels, _ in _batches(dataset, split, index, batch):
        yield pixels


def labelled_images(dataset: Any, split: str) -> tuple[Tensor, Tensor]:
    """Return images `(N, 3, H, W)` uint8 and labels `(N,)` of a split, on the CPU.

    Raises:
        MetricError: The data set was made for a task without labels.
    """
    pixels, labels = zip(*_batches(dataset, split, None, 512), strict=True)
    known = [y.cpu() for y in labels if y is not None]
    if len(known) != len(labels):
        raise MetricError(
            f"data={dataset.name} task={dataset.task} has no labels to train a classifier on"
        )
    return torch.cat([p.cpu() for p in pixels]), torch.cat(known)


def _batches(
    dataset: Any, split: str, index: Tensor | None, batch: int
) -> Iterator[tuple[Tensor, Tensor | None]]:
    if dataset.cannot_decode:
        raise MetricError(f"scores are taken on pixels: {dataset.cannot_decode}")
    index = indices(dataset, split) if index is None else index
    for part in index.split(batch):
        # Without draws nothing is flipped, and the noise of latents belongs to the sample alone.
        found = dataset.batch(part, None, split)
        yield dataset.to_pixels(found.x), found.y
