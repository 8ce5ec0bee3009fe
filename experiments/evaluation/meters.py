"""Meters: the metrics of a stream of images, one meter per feature network and one for adherence.

Networks and references are loaded before anything is sampled, so that an evaluation fails early.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from experiments.data.dataset import Device
from experiments.data.probe import adherence
from experiments.evaluation import distances
from experiments.evaluation.collect import Collector, collect, full_precision
from experiments.evaluation.features import Features, create_features, pixel_features
from experiments.evaluation.images import process_batches, whole_split
from experiments.evaluation.reference import Reference, heldout_reference, load_reference
from experiments.options.evaluation import (
    METRICS,
    EvalOptions,
    MetricError,
    Score,
    make_score,
    plan_scores,
)
from experiments.runtime.processes import gather_rows, world
from routing.errors import require

_LARGEST_PIXELS = 64
# Metrics that are not a comparison with the reference.
_WITHOUT_REFERENCE = ("accuracy", "is")


class Meter(Collector):
    """The metrics of one feature network.

    Args:
        features: The extractor.
        metrics: Keys of `METRICS`.
        options: Neighbours and subsets.
        reference: Statistics of real images, for metrics that compare with them.
        train: Features of training images, `(T, d)`, for memorisation.
    """

    def __init__(
        self,
        features: Features,
        metrics: Sequence[str],
        options: EvalOptions,
        reference: Reference | None = None,
        train: Tensor | None = None,
    ) -> None:
        super().__init__(features, needs_of(metrics))
        self.metrics, self.options = tuple(metrics), options
        self.reference, self.train = reference, train
        self.note = features.note  # a line for the log, as the classifier's accuracy

    def results(self, labels: Tensor | None = None, **record: Any) -> list[Score]:
        """Return the scores over all processes; a collective call.

        `labels` are the requested classes of all images, `(n,)`, and `record` further fields of
        the scores.
        """
        statistics = self.merged()
        values: dict[str, float] = {}
        with full_precision():
            for metric in self.metrics:
                if metric not in values:
                    values |= self._measure(metric, statistics, labels)
        network = None if self.features.name == "pixels" else self.features.identity
        label = None if self.reference is None else self.reference.label
        scores = []
        for key, value in values.items():
            reference = None if key in _WITHOUT_REFERENCE else label
            scores.append(make_score(key, value, statistics["n"], network, reference, record))
        return scores

    def _measure(
        self, metric: str, statistics: dict[str, Any], labels: Tensor | None
    ) -> dict[str, float]:
        """Return the numbers of one metric; what it needs was collected and loaded before."""
        real: Any = self.reference
        if metric == "fd":
            moments = (statistics["mu"], statistics["sigma"], real.mu, real.sigma)
            return {"fd": distances.frechet_distance(*moments)}
        if metric == "sfid":
            moments = (statistics["mu_s"], statistics["sigma_s"], real.mu_s, real.sigma_s)
            return {"sfid": distances.frechet_distance(*moments)}
        if metric == "is":
            return {"is": distances.inception_score(statistics["logits"])}
        if metric == "accuracy":
            assert labels is not None, "plan_scores refused images without classes"
            correct = statistics["logits"].argmax(dim=1) == labels.cpu()
            return {"accuracy": correct.double().mean().item()}
        return self._measure_rows(metric, statistics["rows"])

    def _measure_rows(self, metric: str, rows: Tensor) -> dict[str, float]:
        """Return the numbers of a metric on feature vectors `(n, d)`."""
        options, device, real = self.options, self.features.device, self.reference
        assert real is not None and real.rows is not None, metric
        rows, real_rows = rows.to(device), real.rows.to(device)
        if metric == "kid":
            subsets = options.kid_subsets, options.kid_subset_size
            return {"kid": distances.kernel_distance(rows, real_rows, *subsets)}
        if metric in ("precision", "recall"):
            # One pass over the distances gives both.
            precision, recall = distances.precision_recall(rows, real_rows, options.neighbours)
            values = {"precision": precision, "recall": recall}
            return {key: values[key] for key in values if key in self.metrics}
        assert self.train is not None, metric
        ratio, heldout = distances.memorisation(rows, self.train.to(device), real_rows)
        return {metric: ratio, f"{metric}_heldout": heldout}


class AdherenceMeter:
    """Share of rendered scenes that show the requested class or caption, read by the probe."""

    note = ""

    def __init__(self) -> None:
        self.n = 0
        self._counts: dict[str, list[int]] = {}  # by part of the condition: correct, and of all

    def update(
        self, images: Tensor, labels: Tensor | None = None, captions: Sequence[str] | None = None
    ) -> None:
        """Add a uint8 batch of shape `(B, 3, 32, 32)` with its conditions."""
        self.n += len(images)
        counts = adherence(images, labels=labels, captions=captions)
        for part, (correct, total) in counts.items():
            sums = self._counts.setdefault(part, [0, 0])
            sums[0] += correct
            sums[1] += total

    def results(self, labels: Tensor | None = None, **record: Any) -> list[Score]:
        """Return the shares over all processes; a collective call."""
        counts = torch.tensor([[[self.n, self.n], *self._counts.values()]], dtype=torch.float64)
        total = gather_rows(counts).sum(dim=0)
        n = int(total[0, 0])
        shares = (total[1:, 0] / total[1:, 1].clamp_min(1)).tolist()
        scores = []
        for number, part in enumerate(self._counts):
            # The first part is the whole condition.
            key = "adherence" if number == 0 else f"adherence_{part}"
            scores.append(
                make_score(key, shares[number], n, None, None, record, space="scenes-probe")
            )
        return scores


# --- creation -------------------------------------------------------------------------------------


def needs_of(metrics: Sequence[str]) -> set[str]:
    """Return everything that some of the metrics are computed from."""
    needs: set[str] = set()
    for metric in metrics:
        needs.update(METRICS[metric].needs)
    return needs


def create_meters(
    options: EvalOptions,
    dataset: Any,
    cache: str | os.PathLike[str],
    device: Device = "cpu",
    labelled: bool = True,
) -> list[Meter | AdherenceMeter]:
    """Return the meters of an evaluation; a collective call.

    Args:
        options: What is measured.
        dataset: The data set whose held-out split is the reference unless `options.reference`
            names a file; None for images that belong to no data set.
        cache: Folder of trained networks, weights and references.
        device: Where networks run.
        labelled: Whether the classes or captions of the images are known.

    Raises:
        MetricError: Something cannot be measured.
    """
    processes = world()[1]
    require(
        options.samples >= processes,
        f"{options.samples} images are fewer than {processes} processes; use more",
        MetricError,
    )
    name, sizes = (None, {}) if dataset is None else (dataset.name, dataset.sizes)
    plan = plan_scores(options, name, labelled, sizes)
    without_network = []
    for metric in options.metrics:
        if {"probe", "pixels"}.intersection(METRICS[metric].needs):
            without_network.append(metric)
    reads_pixels = without_network or any(plan.values())
    if dataset is not None and dataset.cannot_decode and reads_pixels:
        raise MetricError(f"scores are computed on pixels: {dataset.cannot_decode}")
    meters: list[Meter | AdherenceMeter] = []
    for features_name, metrics in plan.items():
        if not metrics:
            continue
        features = create_features(
            features_name, options, cache=cache, dataset=dataset, device=device
        )
        meters.append(_create_meter(features, metrics, options, dataset, cache))
    for metric in without_network:
        if metric == "memorisation_pixels":
            meters.append(_pixel_meter(dataset, options, device))
        else:
            meters.append(AdherenceMeter())
    return meters


def _create_meter(
    features: Features,
    metrics: Sequence[str],
    options: EvalOptions,
    dataset: Any,
    cache: str | os.PathLike[str],
) -> Meter:
    """Return the meter of one feature network with its reference."""
    needs = needs_of(metrics)
    rows, spatial = "rows" in needs, "spatial" in needs
    reference = train = None
    # A file holds the statistics of one extractor: the first one's.
    path = options.reference if features.name == options.features[0] else None
    if needs & {"moments", "rows", "spatial"}:
        require(
            path is not None or dataset is not None,
            f"{', '.join(metrics)} compare with real images: pass --reference FILE.npz, "
            "or --data NAME for a data set's held-out split",
            MetricError,
        )
        if path is not None:
            reference = load_reference(path, features, rows, spatial)
        else:
            reference = heldout_reference(dataset, features, cache, spatial=spatial)
    if {"precision", "recall"}.intersection(metrics):
        # Refuses a reference with too few images before training and sampling.
        assert reference is not None and reference.rows is not None
        distances.radii(reference.rows[: options.neighbours + 1], options.neighbours)
    if "train" in needs:
        train = heldout_reference(dataset, features, cache, split="train").rows
    return Meter(features, metrics, options, reference, train)


def _pixel_meter(dataset: Any, options: EvalOptions, device: Device = "cpu") -> Meter:
    """Return the meter of `memorisation_pixels`."""
    images, _ = whole_split(dataset, "test")
    height, width = images.shape[-2:]
    require(
        max(height, width) <= _LARGEST_PIXELS,
        f"memorisation_pixels compares images up to {_LARGEST_PIXELS} pixels wide, these are "
        f"{width}; use memorisation on features",
        MetricError,
    )
    features = pixel_features((height, width), device)
    reference = Reference(
        f"{dataset.name}-test",
        features.identity,
        len(images),
        rows=features(images)["features"].cpu(),
        checksum=dataset.fingerprint,
    )
    train = collect(features, process_batches(dataset, "train"), ("rows",))["rows"]
    return Meter(features, ("memorisation_pixels",), options, reference, train)
