"""One pass over images, keeping what the metrics asked for."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.metrics.collectives import gather_rows, merge_moments
from experiments.metrics.exact import exact
from experiments.metrics.features import Features, check_images
from experiments.metrics.moments import Moments


@dataclass
class Collected:
    """Features of a set of images.

    Attributes:
        n: Number of images.
        moments: Moments of the features, where asked for.
        spatial: Moments of ADM's spatial features, where asked for.
        rows: All feature vectors, `(n, d)` float32 on the CPU, where asked for.
        logits: All logits, `(n, classes)` float32 on the CPU, where asked for.
    """

    n: int
    moments: Moments | None = None
    spatial: Moments | None = None
    rows: Tensor | None = None
    logits: Tensor | None = None


class PixelFeatures:
    """The pixels themselves as features, in 0..1.

    Args:
        shape: Height and width of the images.
    """

    name = "pixels"
    checksum = "0" * 64
    provides: tuple[str, ...] = ("features",)
    note = ""
    device = torch.device("cpu")

    def __init__(self, shape: tuple[int, int]) -> None:
        self.dim = 3 * shape[0] * shape[1]

    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """Return the flattened pixels, `(B, 3 * H * W)`."""
        check_images(images)
        return {"features": images.flatten(1).float() / 255}


class Collector:
    """Takes in batches of images and keeps what is wanted of their features.

    Args:
        features: The extractor.
        wanted: Some of `moments`, `spatial`, `rows`, `logits`.
        device: Where moments are summed; None: where the extractor runs.
    """

    def __init__(
        self, features: Features, wanted: Collection[str], device: torch.device | str | None = None
    ) -> None:
        self.features, self.wanted = features, set(wanted)
        self.device = features.device if device is None else device
        self.n = 0
        self._sums: dict[str, Moments] = {}
        self._rows: dict[str, list[Tensor]] = {"rows": [], "logits": []}

    def update(self, images: Tensor) -> None:
        """Take in a uint8 batch of shape `(B, 3, H, W)`."""
        with exact():
            found = self.features(images)
        self.n += len(images)
        for key, source in (("moments", "features"), ("spatial", "spatial")):
            if key in self.wanted:
                if key not in self._sums:
                    self._sums[key] = Moments(found[source].shape[1], self.device)
                self._sums[key].update(found[source])
        for key, source in (("rows", "features"), ("logits", "logits")):
            if key in self.wanted:
                self._rows[key].append(found[source].float().cpu())

    def merged(self) -> Collected:
        """Return what all processes collected, in rank order; a collective call.

        Every process must have seen at least one image: only then does it know the widths.
        """
        moments, spatial = (self._sums.get(key) for key in ("moments", "spatial"))
        rows, logits = (torch.cat(v) if v else None for v in self._rows.values())
        count = gather_rows(torch.tensor([self.n])).sum()
        return Collected(
            int(count),
            None if moments is None else merge_moments(moments),
            None if spatial is None else merge_moments(spatial),
            None if rows is None else gather_rows(rows),
            None if logits is None else gather_rows(logits),
        )


def collect(
    features: Features,
    images: Iterable[Tensor],
    wanted: Collection[str] = ("moments", "rows"),
    device: torch.device | str | None = None,
) -> Collected:
    """Run `features` over batches of images; in several processes, each brings its own part.

    Args:
        features: The extractor.
        images: uint8 batches of shape `(B, 3, H, W)`.
        wanted: See `Collector`.
        device: Where moments are summed; None: where the extractor runs.
    """
    collector = Collector(features, wanted, device)
    for batch in images:
        collector.update(batch)
    return collector.merged()
