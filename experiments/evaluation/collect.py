"""Features of a stream of images, collected over batches and processes."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from experiments.evaluation import distances
from experiments.evaluation.features import Features
from experiments.options.evaluation import MetricError
from experiments.runtime.processes import gather, gather_rows
from routing.errors import require

# Statistics whose moments are kept: an output of the extractor, and the suffix of `mu`, `sigma`.
MOMENTS = {"moments": ("features", ""), "spatial": ("spatial", "_s")}
# Statistics that are kept for every image: an output of the extractor.
ROWS = {"rows": "features", "logits": "logits"}


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Temporarily switch off autocast and TF32: both change the digits of a distance."""
    matmul, convolution = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = convolution


class Collector:
    """Collects statistics of the features of batches of images.

    Args:
        features: The extractor.
        statistics: `moments` (mean and covariance of the features), `spatial` (the same of ADM's
            spatial features), `rows` (all feature vectors), `logits`; others are ignored.
    """

    def __init__(self, features: Features, statistics: Collection[str]) -> None:
        self.features = features
        self.statistics = set(statistics) & (MOMENTS.keys() | ROWS.keys())
        self.n = 0
        self._moments: dict[str, distances.Moments] = {}
        self._rows: dict[str, list[Tensor]] = {}

    def update(self, images: Tensor, *conditions: Any) -> None:
        """Add a uint8 batch of shape `(B, 3, H, W)`; labels and captions are ignored."""
        with full_precision():
            outputs = self.features(images)
        self.n += len(images)
        for name in self.statistics & MOMENTS.keys():
            output, _ = MOMENTS[name]
            rows = outputs[output]
            if name not in self._moments:
                self._moments[name] = distances.Moments(rows.shape[1], self.features.device)
            self._moments[name].update(rows)
        for name in self.statistics & ROWS.keys():
            self._rows.setdefault(name, []).append(outputs[ROWS[name]].float().cpu())

    def merged(self) -> dict[str, Any]:
        """Return the statistics over all processes, in rank order; a collective call.

        Returns:
            The number of images `n`, and the requested statistics: `mu` (d,) and `sigma` (d, d) of
            the features, `mu_s` and `sigma_s` of the spatial ones as float64 arrays, `rows` (n, d)
            and `logits` (n, classes) as float32 on the CPU.

        Raises:
            MetricError: A process has no images, so that it does not know the widths.
        """
        counts = gather_rows(torch.tensor([self.n]))
        require(
            bool(counts.all()),
            f"{int(counts.sum())} images are fewer than {len(counts)} processes; give more "
            "images or fewer processes",
            MetricError,
        )
        merged: dict[str, Any] = {}
        # In a fixed order: all processes must gather the same statistic at a time.
        for name, (_, suffix) in MOMENTS.items():
            if name in self._moments:
                local = self._moments[name]
                total = distances.Moments(local.dim)
                for part in gather((local.n, local.mean.cpu(), local.scatter.cpu())):
                    total.merge_parts(*part)
                merged[f"mu{suffix}"], merged[f"sigma{suffix}"] = total.finish()
        for name in ROWS:
            if name in self._rows:
                merged[name] = gather_rows(torch.cat(self._rows[name]))
        merged["n"] = int(counts.sum())
        return merged


def collect(
    features: Features, images: Iterable[Tensor], statistics: Collection[str] = ("moments", "rows")
) -> dict[str, Any]:
    """Return the statistics of uint8 batches (B, 3, H, W); each process passes its own part."""
    collector = Collector(features, statistics)
    for batch in images:
        collector.update(batch)
    return collector.merged()
