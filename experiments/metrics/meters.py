"""From batches of images to numbers: one meter per feature extractor, and one for adherence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.metrics import distances, splits
from experiments.metrics.collect import Collected, Collector, PixelFeatures, collect
from experiments.metrics.collectives import gather_rows, share
from experiments.metrics.eval_options import EvalOptions
from experiments.metrics.exact import exact
from experiments.metrics.features import Features, identity
from experiments.metrics.frechet import frechet_distance
from experiments.metrics.metric_names import FEATURES, METRICS, MetricError
from experiments.metrics.reference import Reference

_LARGEST_PIXELS = 64
# Metrics that compare with nothing.
_ALONE = ("accuracy", "is")
# A collector's part for each need of a metric.
_KEEP = {
    "moments": "moments",
    "spatial": "spatial",
    "rows": "rows",
    "logits": "logits",
    "pixels": "rows",
}


@dataclass(frozen=True)
class Result:
    """One number, before it knows how its samples were made.

    Attributes:
        key: Name in `METRICS`, or of a part of one (`adherence_colour`, `memorisation_heldout`).
        value: The number.
        n: Images it was measured on.
        features: Extractor's name, or None for pixels.
        identity: Extractor's name with checksum, or None for pixels.
        reference: Label of what was compared with, or None.
    """

    key: str
    value: float
    n: int
    features: str | None
    identity: str | None
    reference: str | None


def measurable(metric: str, features: str) -> bool:
    """Return whether `metric` has a meaning on the extractor called `features`."""
    needs = METRICS[metric].needs
    if "probe" in needs or "pixels" in needs:
        return False
    if "spatial" in needs or "inception" in needs:
        return features == "inception-adm"
    return "labels" not in needs or features.endswith("-classifier")


def assign(metrics: Sequence[str], features: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return which metrics are measured on which extractor; those without one are left out.

    Raises:
        MetricError: A metric can be measured on none of the extractors.
    """
    alone = [m for m in metrics if {"probe", "pixels"} & set(METRICS[m].needs)]
    plan = {f: tuple(m for m in metrics if measurable(m, f)) for f in features}
    for metric in metrics:
        if metric not in alone and not any(metric in found for found in plan.values()):
            able = ", ".join(f for f in FEATURES if measurable(metric, f))
            have = ", ".join(features) or "none"
            raise MetricError(
                f"metric {metric} cannot be measured on features {have}; use {able} or leave it out"
            )
    return plan


class Meter:
    """The metrics of one extractor.

    Args:
        features: The extractor.
        metrics: Names of `METRICS` that it can measure.
        options: k of precision and recall, subsets of the kernel distance.
        reference: What to compare with; None if no metric compares.
        train: Features of training images `(T, d)`, for memorisation.
        device: Where distances are computed.
    """

    def __init__(
        self,
        features: Features,
        metrics: Sequence[str],
        options: EvalOptions,
        reference: Reference | None = None,
        train: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.features, self.metrics, self.options = features, tuple(metrics), options
        self.reference, self.train, self.device = reference, train, device
        wanted = {_KEEP[need] for m in metrics for need in METRICS[m].needs if need in _KEEP}
        self.collector = Collector(features, wanted, device)

    def update(
        self, images: Tensor, labels: Tensor | None = None, captions: Sequence[str] | None = None
    ) -> None:
        """Take in a uint8 batch of shape `(B, 3, H, W)`."""
        self.collector.update(images)

    def results(self, labels: Tensor | None = None) -> list[Result]:
        """Return the numbers over all processes; a collective call.

        Args:
            labels: Classes that were asked for, of all images in order, or None.
        """
        found = self.collector.merged()
        values: dict[str, float] = {}
        with exact():
            for metric in self.metrics:
                values |= getattr(self, f"_{metric}")(found, labels)
        pixels = isinstance(self.features, PixelFeatures)
        return [
            Result(
                key, value, found.n,
                None if pixels else self.features.name,
                None if pixels else identity(self.features),
                None if self.reference is None or key in _ALONE else self.reference.label,
            )
            for key, value in values.items()
        ]  # fmt: skip

    def _compared(self) -> Reference:
        assert self.reference is not None, "a metric that compares was planned without a reference"
        return self.reference

    def _real_rows(self) -> Tensor:
        rows = self._compared().rows
        assert rows is not None, (
            "a metric on feature rows was planned with a reference without them"
        )
        return rows.to(self.device)

    def _fd(self, found: Collected, labels: Tensor | None) -> dict[str, float]:
        assert found.moments is not None
        real = self._compared()
        return {"fd": frechet_distance(*found.moments.finish(), real.mu, real.sigma)}

    def _sfid(self, found: Collected, labels: Tensor | None) -> dict[str, float]:
        real = self._compared()
        assert found.spatial is not None and real.mu_s is not None and real.sigma_s is not None
        return {"sfid": frechet_distance(*found.spatial.finish(), real.mu_s, real.sigma_s)}

    def _is(self, found: Collected, labels: Tensor | None) -> dict[str, float]:
        assert found.logits is not None
        return {"is": distances.inception_score(found.logits)}

    def _accuracy(self, found: Collected, labels: Tensor | None) -> dict[str, float]:
        assert found.logits is not None
        if labels is None:
            raise MetricError(
                "accuracy compares with the classes asked for, and these images have none; "
                "leave it out"
            )
        return {"accuracy": (found.logits.argmax(dim=1) == labels.cpu()).double().mean().item()}

    def _rows(self, found: Collected) -> Tensor:
        assert found.rows is not None
        return found.rows.to(self.device)

    def _precision(self, found: Collected, labels: Tensor | None) -> dict[str, float]:
        k = self.options.neighbours
        precision, recall = distances.precision_recall(self._rows(found), self._real_rows(), k)
        both = {"precision": precision, "recall": recall}
        return {key: value for key, value in both.items() if key in self.metrics}

    # One pass over the distances gives both; which of the two was asked for first does not matter.
    _recall = _precision

    def _kid(self, found: Collected, labels: Tensor | None) -> dict[str, float]:
        options = self.options
        distance = distances.kernel_distance(
            self._rows(found), self._real_rows(), options.kid_subsets, options.kid_subset_size
        )
        return {"kid": distance}

    def _memorisation(self, found: Collected, labels: Tensor | None) -> dict[str, float]:
        assert self.train is not None
        ratio, fresh = distances.memorisation(
            self._rows(found), self.train.to(self.device), self._real_rows()
        )
        name = self.metrics[0] if len(self.metrics) == 1 else "memorisation"
        return {name: ratio, f"{name}_heldout": fresh}

    _memorisation_pixels = _memorisation


def pixel_meter(dataset: Any, options: EvalOptions, device: torch.device | str = "cpu") -> Meter:
    """Return the meter of `memorisation_pixels`.

    Raises:
        MetricError: Images too large to compare pixel by pixel.
    """
    held = torch.cat([x.cpu() for x in splits.images(dataset, "test")])
    if max(held.shape[-2:]) > _LARGEST_PIXELS:
        raise MetricError(
            f"memorisation_pixels compares images up to {_LARGEST_PIXELS} pixels wide, these are "
            f"{held.shape[-1]}; use memorisation on features"
        )
    features = PixelFeatures((held.shape[-2], held.shape[-1]))
    rows = features(held)["features"]
    moments = torch.zeros(0).numpy()
    label = f"{dataset.name}-test", identity(features), len(held)
    reference = Reference(*label, moments, moments, None, None, rows, dataset.fingerprint)
    return Meter(
        features,
        ("memorisation_pixels",),
        options,
        reference,
        train_rows(dataset, features),
        device,
    )


def train_rows(dataset: Any, features: Features) -> Tensor:
    """Return features of the training images, `(T, d)`; a collective call.

    Raises:
        MetricError: The training set is endless: there is nothing to memorise.
    """
    if dataset.sizes["train"] is None:
        raise MetricError(
            f"data={dataset.name} is endless: nothing can be memorised; leave out memorisation"
        )
    index = splits.indices(dataset, "train")
    mine = share(len(index))
    rows = collect(
        features, splits.images(dataset, "train", index[mine.start : mine.stop]), ("rows",)
    ).rows
    assert rows is not None
    return rows


class AdherenceMeter:
    """Share of rendered scenes that show the class or caption asked for, read by the probe."""

    def __init__(self) -> None:
        self.n = 0
        self._sums: dict[str, float] = {}

    def update(
        self, images: Tensor, labels: Tensor | None = None, captions: Sequence[str] | None = None
    ) -> None:
        """Take in a uint8 batch of shape `(B, 3, 32, 32)` with what was asked for."""
        from experiments.data.probe import adherence

        self.n += len(images)
        asked = {"labels": labels} if captions is None else {"captions": captions}
        for key, value in adherence(images, **asked).items():
            self._sums[key] = self._sums.get(key, 0.0) + value * len(images)

    def results(self, labels: Tensor | None = None) -> list[Result]:
        """Return the shares over all processes; a collective call."""
        packed = torch.tensor([[float(self.n), *self._sums.values()]], dtype=torch.float64)
        total = gather_rows(packed).sum(dim=0)
        shares = (total[1:] / total[0]).tolist()
        main = next(iter(self._sums))
        return [
            Result(
                "adherence" if key == main else f"adherence_{key}",
                value,
                int(total[0]),
                "scenes-probe",
                None,
                None,
            )
            for key, value in zip(self._sums, shares, strict=True)
        ]
