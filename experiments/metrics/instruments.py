"""What an evaluation needs, loaded before anything is sampled, so that it fails early."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from experiments.metrics import meters, reference
from experiments.metrics.eval_options import EvalOptions
from experiments.metrics.features import Features, create_features
from experiments.metrics.meters import Result
from experiments.metrics.metric_names import METRICS, MetricError


@dataclasses.dataclass
class Bench:
    """The meters of one evaluation, with references loaded.

    Attributes:
        options: What is measured.
        meters: One per extractor, and one for adherence.
        notes: Lines for the log, as the classifier's accuracy.
    """

    options: EvalOptions
    meters: list[Any]
    notes: list[str]

    def update(
        self, images: Tensor, labels: Tensor | None = None, captions: Sequence[str] | None = None
    ) -> None:
        """Show a uint8 batch `(B, 3, H, W)` to every meter."""
        for meter in self.meters:
            meter.update(images, labels, captions)

    def results(self, labels: Tensor | None) -> list[Result]:
        """Return all numbers over all processes; a collective call."""
        return [result for meter in self.meters for result in meter.results(labels)]


def prepare(
    options: EvalOptions,
    dataset: Any,
    cache: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    labelled: bool = True,
    data: Any = None,
) -> Bench:
    """Load extractors and references, and refuse what cannot be measured; a collective call.

    Args:
        options: What to measure.
        dataset: The data set whose held-out split is the reference unless `options.reference` names
            a file; None for images from elsewhere, which then need a file.
        cache: Folder of trained classifiers, downloaded weights and references.
        device: Where the networks run.
        labelled: Whether classes or captions were asked for.
        data: Options of the data set, for a classifier in a run without labels.

    Raises:
        MetricError: One sentence on what does not fit.
    """
    plan = meters.assign(options.metrics, options.features)
    alone = [m for m in options.metrics if {"probe", "pixels"} & set(METRICS[m].needs)]
    if dataset is not None and dataset.cannot_decode:
        raise MetricError(f"scores are taken on pixels: {dataset.cannot_decode}")
    if not labelled and {"accuracy", "adherence"} & set(options.metrics):
        raise MetricError(
            "accuracy and adherence compare with what was asked for, which is not known here; "
            "leave them out of the metrics"
        )
    made: list[Any] = []
    notes: list[str] = []
    for name, metrics in plan.items():
        if metrics:
            features = create_features(
                name,
                options,
                cache=cache,
                dataset=labelled_data(dataset, name, data),
                device=device,
            )
            made.append(_meter(features, metrics, options, dataset, cache, device))
            notes += [features.note] if features.note else []
    for metric in alone:
        if dataset is None or (metric == "adherence" and dataset.name != "scenes"):
            have = "images from elsewhere" if dataset is None else f"data={dataset.name}"
            need = "data=scenes" if metric == "adherence" else "a data set with a held-out split"
            raise MetricError(
                f"metric {metric} needs {need}, here are {have}; leave it out of the metrics"
            )
        pixels = metric == "memorisation_pixels"
        made.append(
            meters.pixel_meter(dataset, options, device) if pixels else meters.AdherenceMeter()
        )
    return Bench(options, made, notes)


def labelled_data(dataset: Any, features: str, data: Any = None) -> Any:
    """Return the data set with labels: its classifier needs them whatever the run's task is."""
    if dataset is None or not features.endswith("-classifier") or dataset.task == "class":
        return dataset
    from experiments.data.dataset import create

    return create(data or {"name": dataset.name}, task="class", device=dataset.device)


def _meter(
    features: Features,
    metrics: Sequence[str],
    options: EvalOptions,
    dataset: Any,
    cache: str | os.PathLike[str],
    device: torch.device | str,
) -> meters.Meter:
    needs = {need for m in metrics for need in METRICS[m].needs}
    real = None
    if needs & {"moments", "rows", "spatial"}:
        spatial = "spatial" in needs
        if options.reference is not None:
            real = reference.load(
                options.reference, features, rows="rows" in needs, spatial=spatial
            )
        elif dataset is not None:
            real = reference.heldout(dataset, features, cache, spatial=spatial)
        else:
            raise MetricError(
                f"{', '.join(metrics)} compare with real images: pass --reference FILE.npz, "
                "or --data NAME for a data set's held-out split"
            )
    train = None
    if "train" in needs:
        if dataset is None:
            raise MetricError(
                "memorisation compares with training images: pass --data NAME or leave it out"
            )
        train = meters.train_rows(dataset, features)
    return meters.Meter(features, metrics, options, real, train, device)
