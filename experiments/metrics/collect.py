"""One pass over images on all processes, keeping what the metrics need of their features."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.metrics.distances import Moments
from experiments.metrics.eval_options import MetricError


def world() -> tuple[int, int]:
    """Return (rank, number of processes)."""
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def share(n: int, rank: int | None = None) -> range:
    """Return a process's part of `n` items: consecutive, in rank order, of nearly equal size."""
    own, size = world()
    rank = own if rank is None else rank
    return range(n * rank // size, n * (rank + 1) // size)


@contextlib.contextmanager
def main_first() -> Iterator[None]:
    """Let the first process go through the block alone, then the others: a cache is filled once."""
    rank, size = world()
    if size > 1 and rank:
        torch.distributed.barrier()
    try:
        yield
    finally:
        if size > 1 and not rank:
            torch.distributed.barrier()


def merge_moments(own: Moments) -> Moments:
    """Return the moments over all processes, merged in rank order: the same numbers everywhere."""
    if world()[1] == 1:
        return own
    total = Moments(own.dim)
    parts = (torch.tensor([own.n]), own.mean[None], own.scatter[None])
    for n, mean, scatter in zip(*map(gather_rows, parts), strict=True):
        total.merge_parts(int(n), mean, scatter)
    return total


def gather_rows(own: Tensor) -> Tensor:
    """Return every process's rows (n, ...), in rank order, on the CPU; n may differ."""
    own, size = own.cpu(), world()[1]
    if size == 1:
        return own
    parts: list[Tensor] = [own] * size
    torch.distributed.all_gather_object(parts, own)
    return torch.cat(parts)


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """Switch off autocast and TF32 inside the block: both move the digits of a distance."""
    matmul, convolution = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = convolution


class Features:
    """A feature extractor: a subclass says in `measure` what it sees of images."""

    name: str  # one of `eval_options.FEATURES`
    dim: int  # length of a feature vector
    checksum: str  # SHA-256 of its weights
    provides: tuple[str, ...] = ("features",)  # what a call returns: also `logits`, `spatial`
    device = torch.device("cpu")  # where it runs
    note = ""  # a line for the log, as the classifier's accuracy

    @torch.no_grad()
    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """Return what `measure` sees of images on any device; see there."""
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
            raise MetricError(
                "features take uint8 images of shape (B, 3, H, W), "
                f"got {images.dtype} {tuple(images.shape)}"
            )
        return self.measure(images.to(self.device))

    def measure(self, images: Tensor) -> dict[str, Tensor]:
        """Return float32 `features` `(B, dim)`, and `logits` and `spatial` rows where provided.

        Args:
            images: uint8 with shape `(B, 3, H, W)`, on the extractor's device.
        """
        raise NotImplementedError


def identity(features: Features) -> str:
    """Return name and start of the weights' checksum, as `digits-classifier@1f2e3d4c`."""
    return f"{features.name}@{features.checksum[:8]}"


@dataclass
class Collected:
    """What was wanted of the features of a set of images."""

    n: int  # number of images
    moments: Moments | None = None  # of the features
    spatial: Moments | None = None  # of ADM's spatial features
    rows: Tensor | None = None  # all feature vectors, `(n, d)` float32 on the CPU
    logits: Tensor | None = None  # `(n, classes)` float32 on the CPU


# What a feature extractor returns, for each part of a collection.
_SOURCES = {"moments": "features", "spatial": "spatial", "rows": "features", "logits": "logits"}


class Collector:
    """Takes in batches of images and keeps the parts of a collection that are wanted."""

    def __init__(self, features: Features, wanted: Collection[str]) -> None:
        self.features, self.wanted = features, set(wanted)
        self.n = 0
        self._sums: dict[str, Moments] = {}
        self._rows: dict[str, list[Tensor]] = {}

    def update(self, images: Tensor) -> None:
        """Take in a uint8 batch of shape `(B, 3, H, W)`."""
        with exact():
            found = self.features(images)
        self.n += len(images)
        for key in self.wanted:
            rows = found[_SOURCES[key]]
            if key in ("rows", "logits"):
                self._rows.setdefault(key, []).append(rows.float().cpu())
            else:
                if key not in self._sums:
                    self._sums[key] = Moments(rows.shape[1], self.features.device)
                self._sums[key].update(rows)

    def merged(self) -> Collected:
        """Return what all processes collected, in rank order; a collective call.

        Raises:
            MetricError: A process has seen no image, and does not know the widths.
        """
        counts = gather_rows(torch.tensor([self.n]))
        if not bool(counts.all()):
            raise MetricError(
                f"{int(counts.sum())} images are fewer than {len(counts)} processes; give more "
                "images or fewer processes"
            )
        # In an order of our own: all processes have to gather the same.
        found: dict[str, Any] = {key: merge_moments(v) for key, v in sorted(self._sums.items())}
        found |= {key: gather_rows(torch.cat(v)) for key, v in sorted(self._rows.items())}
        return Collected(int(counts.sum()), **found)


def collect(
    features: Features, images: Iterable[Tensor], wanted: Collection[str] = ("moments", "rows")
) -> Collected:
    """Run `features` over uint8 batches (B, 3, H, W); each process brings its own part."""
    collector = Collector(features, wanted)
    for batch in images:
        collector.update(batch)
    return collector.merged()
