"""From batches of images to numbers: one meter per feature extractor, and one for adherence.

Networks and references are loaded before anything is sampled, so that an evaluation fails early.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from experiments.data.dataset import Device, create
from experiments.data.probe import adherence
from experiments.metrics import collect, distances
from experiments.metrics.eval_options import (
    METRICS,
    EvalOptions,
    MetricError,
    Score,
    direction,
    full_name,
    plan_scores,
)
from experiments.metrics.features import PixelFeatures, create_features
from experiments.metrics.images import split_images

_LARGEST_PIXELS = 64
# Metrics that compare with nothing.
_ALONE = ("accuracy", "is")
# A collector's part for each need of a metric.
_KEEP = {need: need for need in ("moments", "spatial", "rows", "logits")} | {"pixels": "rows"}


def scored(
    key: str,
    value: float,
    n: int,
    features: str | None,
    identity: str | None,
    reference: str | None,
    record: dict[str, Any],
) -> Score:
    """Return a score with its full name and its better end."""
    name = full_name(key, n, features)
    return Score(name, key, value, n, identity, reference, better=direction(key), **record)


class Meter(collect.Collector):
    """The metrics of one extractor, against a reference where one compares.

    `train` are features of training images `(T, d)`, for memorisation.
    """

    def __init__(
        self,
        features: collect.Features,
        metrics: Sequence[str],
        options: EvalOptions,
        reference: collect.Reference | None = None,
        train: Tensor | None = None,
    ) -> None:
        needs = {need for metric in metrics for need in METRICS[metric].needs}
        super().__init__(features, {_KEEP[need] for need in needs & _KEEP.keys()})
        self.metrics, self.options = tuple(metrics), options
        self.reference, self.train = reference, train
        self.note = features.note  # a line for the log, as the classifier's accuracy

    def results(self, labels: Tensor | None = None, **record: Any) -> list[Score]:
        """Return the scores over all processes; a collective call."""
        found = self.merged()
        values: dict[str, float] = {}
        with collect.exact():
            for metric in self.metrics:
                if metric not in values:
                    values |= self._measure(metric, found, labels)
        pixels = isinstance(self.features, PixelFeatures)
        name = None if pixels else self.features.name
        weights = None if pixels else collect.identity(self.features)
        label = None if self.reference is None else self.reference.label
        return [
            scored(key, value, found.n, name, weights, None if key in _ALONE else label, record)
            for key, value in values.items()
        ]

    def _measure(self, metric: str, found: Any, labels: Tensor | None) -> dict[str, float]:
        """Return the numbers of one metric; what it needs was collected and loaded before."""
        real: Any = self.reference
        if metric == "fd":
            mu, sigma = found.moments.finish()
            return {"fd": distances.frechet_distance(mu, sigma, real.mu, real.sigma)}
        if metric == "sfid":
            mu, sigma = found.spatial.finish()
            return {"sfid": distances.frechet_distance(mu, sigma, real.mu_s, real.sigma_s)}
        if metric == "is":
            return {"is": distances.inception_score(found.logits)}
        if metric == "accuracy":
            assert labels is not None, "plan_scores refused images without classes"
            return {"accuracy": (found.logits.argmax(dim=1) == labels.cpu()).double().mean().item()}
        device = self.features.device
        rows, real_rows = found.rows.to(device), real.rows.to(device)
        if metric == "kid":
            o = self.options
            kid = distances.kernel_distance(rows, real_rows, o.kid_subsets, o.kid_subset_size)
            return {"kid": kid}
        if metric in ("precision", "recall"):
            # One pass over the distances gives both.
            both = distances.precision_recall(rows, real_rows, self.options.neighbours)
            named = zip(("precision", "recall"), both, strict=True)
            return {key: value for key, value in named if key in self.metrics}
        assert self.train is not None, metric
        ratio, fresh = distances.memorisation(rows, self.train.to(device), real_rows)
        return {metric: ratio, f"{metric}_heldout": fresh}


def pixel_meter(dataset: Any, options: EvalOptions, device: Device = "cpu") -> Meter:
    """Return the meter of `memorisation_pixels`."""
    held = torch.cat([x.cpu() for x in split_images(dataset, "test")])
    if max(held.shape[-2:]) > _LARGEST_PIXELS:
        raise MetricError(
            f"memorisation_pixels compares images up to {_LARGEST_PIXELS} pixels wide, these are "
            f"{held.shape[-1]}; use memorisation on features"
        )
    features = PixelFeatures((held.shape[-2], held.shape[-1]), device)
    rows = features(held)["features"].cpu()
    moments = torch.zeros(0).numpy()
    label = f"{dataset.name}-test", collect.identity(features), len(held)
    reference = collect.Reference(*label, moments, moments, None, None, rows, dataset.fingerprint)
    train = collect.collect(features, collect.own_images(dataset, "train"), ("rows",)).rows
    return Meter(features, ("memorisation_pixels",), options, reference, train)


class AdherenceMeter:
    """Share of rendered scenes that show the requested class or caption, read by the probe."""

    note = ""

    def __init__(self) -> None:
        self.n = 0
        self._sums: dict[str, list[int]] = {}  # by part: hits, and of how many

    def update(
        self, images: Tensor, labels: Tensor | None = None, captions: Sequence[str] | None = None
    ) -> None:
        """Update with a uint8 batch of shape `(B, 3, 32, 32)` and its conditions."""
        self.n += len(images)
        asked = {"labels": labels} if captions is None else {"captions": captions}
        for key, counts in adherence(images, **asked).items():
            held = self._sums.setdefault(key, [0, 0])
            self._sums[key] = [a + b for a, b in zip(held, counts, strict=True)]

    def results(self, labels: Tensor | None = None, **record: Any) -> list[Score]:
        """Return the shares over all processes; a collective call."""
        packed = torch.tensor([[[self.n, self.n], *self._sums.values()]], dtype=torch.float64)
        total = collect.gather_rows(packed).sum(dim=0)
        shares = (total[1:, 0] / total[1:, 1].clamp_min(1)).tolist()
        main, n = next(iter(self._sums)), int(total[0, 0])
        names = ["adherence" if key == main else f"adherence_{key}" for key in self._sums]
        return [
            scored(name, value, n, "scenes-probe", None, None, record)
            for name, value in zip(names, shares, strict=True)
        ]


def prepare(
    options: EvalOptions,
    dataset: Any,
    cache: str | os.PathLike[str],
    device: Device = "cpu",
    labelled: bool = True,
    data: Any = None,
) -> list[Meter | AdherenceMeter]:
    """Return a meter per extractor and one for adherence, or refuse; a collective call.

    The reference is the held-out split of `dataset` unless `options.reference` names a file, which
    images from elsewhere (None) need. `labelled`: whether the classes or captions of the images are
    known; `data`: options of the data set, for a classifier in a run without labels.
    """
    name, sizes = (None, {}) if dataset is None else (dataset.name, dataset.sizes)
    plan = plan_scores(options, name, labelled, sizes)
    alone = [m for m in options.metrics if {"probe", "pixels"} & set(METRICS[m].needs)]
    if dataset is not None and dataset.cannot_decode and (alone or any(plan.values())):
        raise MetricError(f"scores are taken on pixels: {dataset.cannot_decode}")
    made: list[Meter | AdherenceMeter] = []
    for name, metrics in plan.items():
        if metrics:
            chosen = labelled_data(dataset, name, data)
            features = create_features(name, options, cache=cache, dataset=chosen, device=device)
            made.append(_meter(features, metrics, options, dataset, cache))
    for metric in alone:
        pixels = metric == "memorisation_pixels"
        made.append(pixel_meter(dataset, options, device) if pixels else AdherenceMeter())
    return made


def labelled_data(dataset: Any, features: str, data: Any = None) -> Any:
    """Return the data set with labels: its classifier needs them whatever the run's task is."""
    if dataset is None or not features.endswith("-classifier") or dataset.task == "class":
        return dataset
    return create(data or {"name": dataset.name}, task="class", device=dataset.device)


def _meter(
    features: collect.Features,
    metrics: Sequence[str],
    options: EvalOptions,
    dataset: Any,
    cache: str | os.PathLike[str],
) -> Meter:
    needs = {need for m in metrics for need in METRICS[m].needs}
    real: Any = None
    if needs & {"moments", "rows", "spatial"}:
        spatial = "spatial" in needs
        # A file holds the statistics of one extractor: the main one's.
        if options.reference is not None and features.name == options.features[0]:
            real = collect.load_reference(
                options.reference, features, rows="rows" in needs, spatial=spatial
            )
        elif dataset is not None:
            real = collect.heldout_reference(dataset, features, cache, spatial=spatial)
        else:
            raise MetricError(
                f"{', '.join(metrics)} compare with real images: pass --reference FILE.npz, "
                "or --data NAME for a data set's held-out split"
            )
    if real is not None and {"precision", "recall"} & set(metrics):  # refuses too few, early
        distances.radii(real.rows[: options.neighbours + 1], options.neighbours)
    train = None
    if "train" in needs:
        train = collect.heldout_reference(dataset, features, cache, split="train").rows
    return Meter(features, metrics, options, real, train)
