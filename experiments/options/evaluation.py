"""Metrics, feature networks, evaluation options and the names of scores (no torch here).

A score's name identifies it: `FID-5K (inception-adm)` and `FD-200 (digits-classifier)` are
different quantities, and neither is "the FID".
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from annotated_types import Ge, Le

from backbones.validation import Choices, validate
from experiments.options.roles import config_defaults
from experiments.runtime.digest import sampled
from routing.errors import UserError, one_of, require

_CONF = Path(__file__).resolve().parents[1] / "conf" / "eval"


class MetricError(UserError):
    """A metric, its features or its reference cannot be measured as requested."""


@dataclass(frozen=True)
class Metric:
    """One measurable quantity."""

    # How a score's name spells it; some features rename it (FD on Inception is FID)
    label: str
    # What it is computed from: `moments`, `rows` (all feature vectors), `logits`, `spatial`,
    # `labels`, `train` (training images), `inception` (defined on Inception only), `pixels` (the
    # images, without a network), `probe` (scenes), `model` (the model, without samples)
    needs: tuple[str, ...]
    better: str  # `lower` or `higher`


METRICS: dict[str, Metric] = {
    # Frechet distance to the reference's features, and to ADM's spatial features
    "fd": Metric("FD", ("moments",), "lower"),
    "sfid": Metric("sFID", ("spatial",), "lower"),
    # Inception Score, splits of 5000 as ADM
    "is": Metric("IS", ("logits", "inception"), "higher"),
    # share of samples inside the reference's k-NN manifold, and the reverse
    "precision": Metric("precision", ("rows",), "higher"),
    "recall": Metric("recall", ("rows",), "higher"),
    # kernel distance, polynomial kernel, unbiased
    "kid": Metric("KD", ("rows",), "lower"),
    # share of samples classified as the requested class; that show the requested class or caption
    "accuracy": Metric("accuracy", ("labels", "logits"), "higher"),
    "adherence": Metric("adherence", ("probe", "labels"), "higher"),
    # distance to the nearest training image over that to the nearest held-out image
    "memorisation": Metric("memorisation", ("rows", "train"), "higher"),
    "memorisation_pixels": Metric("memorisation-pixels", ("pixels", "rows", "train"), "higher"),
    # the objective's own loss of a dense pass on held-out data, and of the routed pass
    "heldout_loss": Metric("heldout-loss", ("model",), "lower"),
}

#: Needs of metrics that are not computed from a feature network.
WITHOUT_FEATURES = frozenset(("probe", "pixels", "model"))

FEATURES: dict[str, str] = {
    "digits-classifier": "a small network trained on the digits' training split (8x8)",
    "fashion-classifier": "the same for fashion (32x32)",
    "mnist-classifier": "the same for mnist (32x32)",
    "torchvision-classifier": "the same for any set of data=torchvision (32x32)",
    "autoencoder": "a small autoencoder trained on the data set's training images, without labels",
    "scenes-probe": "the network that reads rendered scenes, which comes with the project (32x32)",
    "inception-adm": "Inception v3 of 2015 as ADM uses it: FID, sFID, IS, precision, recall",
    "dinov2-vitl14": "DINOv2 ViT-L/14 at 224 pixels: FD-DINOv2",
    "dinov2-vits14": "DINOv2 ViT-S/14 at 224 pixels: a faster FD, not the published FD-DINOv2",
}

#: Networks with published weights, which are downloaded or given as a file.
PUBLISHED = frozenset(("inception-adm", "dinov2-vitl14", "dinov2-vits14", "dinov2-vitb14"))

# Features that give a metric a name of its own.
_RENAMED = {
    ("fd", "inception-adm"): "FID",
    ("kid", "inception-adm"): "KID",
    ("fd", "dinov2-vitl14"): "FD-DINOv2",
    ("fd", "dinov2-vits14"): "FD-DINOv2",
}


def full_name(metric: str, n: int, features: str | None) -> str:
    """Return a score's name with sample count and features, as `FID-5K (inception-adm)`."""
    label = _RENAMED.get((metric, features or ""))
    if label is None and metric in METRICS:
        label = METRICS[metric].label
    elif label is None:  # part of a metric, as adherence_colour
        label = metric.replace("_", "-")
    count = f"{n // 1000}K" if n >= 1000 and n % 1000 == 0 else str(n)  # 5K; but 500, 1200
    return f"{label}-{count} ({features})" if features else f"{label}-{count}"


@dataclass(frozen=True)
class Score:
    """One measured number with everything that is needed to read it."""

    metric: str  # full name, as `FD-200 (digits-classifier)`
    key: str  # name of the metric in the code, as `fd`
    value: float
    n: int  # number of samples
    features: str | None  # extractor and start of its checksum, as `digits-classifier@1f2e3d4c`
    reference: str | None  # name and start of the checksum of the reference, or None
    seed: int | None = None  # of the first sample
    # How it was sampled, as `cfg scale=1.5` and `heun steps=12`, the training step of the weights,
    # and multiply-adds per image; None for images that no run made
    guidance: str | None = None
    sampler: str | None = None
    step: int | None = None
    macs_per_sample: float | None = None
    better: str = "lower"  # `lower` or `higher`
    source: str | None = None  # where the images came from, if not from the run itself

    def __post_init__(self) -> None:
        require(
            math.isfinite(self.value),
            f"{self.metric} is {self.value}: the samples or the reference are not finite",
            MetricError,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON can hold them."""
        return asdict(self)


def make_score(
    key: str,
    value: float,
    n: int,
    features: str | None,
    reference: str | None,
    record: Mapping[str, Any],
    space: str | None = None,
) -> Score:
    """Return a score with its full name.

    Args:
        key: Name of the metric in the code.
        value: The number.
        n: Number of samples.
        features: Extractor and start of its checksum, or None.
        reference: Name and start of the checksum of the reference, or None.
        record: Further fields of `Score`.
        space: What the name says in place of the features.
    """
    if space is None and features is not None:
        space = features.partition("@")[0]
    # A part of a metric (adherence_colour, heldout_loss_routed) is judged like the whole.
    metric = key if key in METRICS else key.rsplit("_", 1)[0]
    return Score(
        full_name(key, n, space),
        key,
        value,
        n,
        features,
        reference,
        better=METRICS[metric].better,
        **record,
    )


# --- options --------------------------------------------------------------------------------------


FeatureName = Annotated[str, Choices(tuple(FEATURES))]
MetricName = Annotated[str, Choices(tuple(METRICS))]


@dataclass(frozen=True)
class EvalOptions:
    """What is measured, on how many samples and against what."""

    name: Annotated[str, "Preset of conf/eval."] = "digits"
    every: Annotated[
        int, Ge(0), Le(10**7), "Steps between scores during training; 0: only at the end."
    ] = 0
    samples: Annotated[
        int,
        Ge(2),
        Le(10**7),
        "Samples. FD needs more of them than the network has features (64 for the classifiers).",
    ] = 500
    features: Annotated[
        tuple[FeatureName, ...] | FeatureName, "Feature networks, measured one after another."
    ] = ("digits-classifier",)
    metrics: Annotated[
        tuple[MetricName, ...] | MetricName,
        "Metrics, each measured on every feature network that has what it needs. accuracy: share "
        "of samples classified as the requested class. memorisation: NN-distance ratio (train / "
        "held-out); lower values indicate copying.",
    ] = ("fd", "accuracy")
    labels: Annotated[
        Literal["balanced", "random"],
        "Labels of the samples: balanced (class i mod classes) or random (ImageNet protocol).",
    ] = "balanced"
    seed: Annotated[int, Ge(0), Le(2**62), "Seed of the first sample; sample i has seed + i."] = (
        100000
    )
    batch: Annotated[
        int,
        Ge(1),
        Le(10**7),
        "Images per sampling batch and process; images are bitwise reproducible at equal batch.",
    ] = 250
    reference: Annotated[
        str | None,
        "Reference statistics (.npz) for the first feature network; null: the held-out split.",
    ] = None
    neighbours: Annotated[int, Ge(1), Le(10**7), "k of precision and recall (ADM: 3)."] = 3
    kid_subsets: Annotated[int, Ge(1), Le(10**7), "Subsets of the kernel distance."] = 100
    kid_subset_size: Annotated[int, Ge(2), Le(10**7), "Images per subset."] = 1000
    inception_weights: Annotated[
        str | None, "Weights of Inception (torch-fidelity's file); null: the cache or a download."
    ] = None
    dinov2_weights: Annotated[
        str | None, "Weights of DINOv2 (timm's file); null: timm's cache or a download."
    ] = None

    def __post_init__(self) -> None:
        for name in ("features", "metrics"):
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, (value,))

    def check_consistency(self) -> None:
        """Refuse an empty list of metrics."""
        if not self.metrics:
            raise MetricError(f"eval.metrics=[]: expected some of {', '.join(METRICS)}")

    def path_fingerprints(self) -> dict[str, str]:
        """Return what a run's hash holds in place of the options that are paths."""
        fingerprints = {}
        for key in ("reference", "inception_weights", "dinov2_weights"):
            value = getattr(self, key)
            if value is not None:
                path = Path(value).expanduser()
                fingerprints[key] = sampled(path).hex()[:16] if path.is_file() else "absent"
        return fingerprints

    @property
    def enabled(self) -> bool:
        """Whether a run is scored while it trains and at its end: false for eval=none."""
        return self.name != "none"

    def without_metrics(self, *names: str) -> EvalOptions:
        """Return these options without some metrics.

        Raises:
            MetricError: No metric remains.
        """
        options = replace(self, metrics=tuple(m for m in self.metrics if m not in names))
        options.check_consistency()
        return options


def defaults_for(data: str | None) -> dict[str, Any]:
    """Return the options of `conf/eval` that fit a data set: its own, or the Inception protocol."""
    path = _CONF / f"{data}.yaml"
    if not path.is_file():
        path = _CONF / "inception.yaml"
    preset = yaml.safe_load(path.read_text())
    values: dict[str, Any] = {}
    for parent in preset.pop("defaults", ()):
        values |= config_defaults(EvalOptions) if parent == "base" else defaults_for(parent)
    return values | preset


def options_for(config: Any, **changes: Any) -> EvalOptions:
    """Return a run's evaluation options with `changes` (None keeps the run's own).

    Without requested classes or captions, a run's own metrics lose accuracy and adherence.
    """
    changes = {key: value for key, value in changes.items() if value is not None}
    # A run with eval=none is measured as its data usually are.
    values = {**defaults_for(config.data.name), **config.composed["eval"], **changes}
    options: EvalOptions = validate(EvalOptions, values, "eval.")
    if config.task == "none" and "metrics" not in changes:
        options = options.without_metrics("accuracy", "adherence")
    return options


def options_for_images(data: str | None, **changes: Any) -> EvalOptions:
    """Return the evaluation options for images that no run made (None keeps the default).

    They are those that fit the data set, or the Inception protocol. The conditions of such images
    are unknown, so the default metrics are those that need none.
    """
    changes = {key: value for key, value in changes.items() if value is not None}
    options: EvalOptions = validate(EvalOptions, {**defaults_for(data), **changes}, "eval.")
    if "metrics" in changes:
        return options
    if "features" in changes:  # a short list that every extractor can measure
        return replace(options, metrics=("fd", "precision", "recall"))
    return options.without_metrics("accuracy", "adherence", "heldout_loss")


# --- what can be measured -------------------------------------------------------------------------


def measurable(metric: str, features: str) -> bool:
    """Return whether `metric` is defined on the extractor called `features`."""
    needs = METRICS[metric].needs
    if WITHOUT_FEATURES.intersection(needs):
        return False
    if "spatial" in needs or "inception" in needs:
        return features == "inception-adm"
    return "labels" not in needs or features.endswith("-classifier")


def plan_scores(
    options: EvalOptions, data: str | None, labelled: bool, sizes: Mapping[str, int | None]
) -> dict[str, tuple[str, ...]]:
    """Return the metrics to measure on each extractor.

    Args:
        options: What is measured.
        data: Name of the images' data set, None for images that belong to none.
        labelled: Whether the classes or captions of the images are known.
        sizes: Number of images by split, {} where they are not known.

    Raises:
        MetricError: A metric or an extractor that cannot be used here.
    """
    plan = {}
    for features in options.features:
        plan[features] = tuple(m for m in options.metrics if measurable(m, features))
    for metric in options.metrics:
        _check_features_of(metric, plan)
        _check_data_of(metric, data, labelled, sizes)
    _check_neighbours(options, sizes)
    for features, metrics in plan.items():
        if metrics:
            check_features(features, data)
    return plan


def _check_features_of(metric: str, features: Collection[str]) -> None:
    """Refuse a metric that none of these extractors can measure."""
    if WITHOUT_FEATURES.intersection(METRICS[metric].needs):
        return
    suitable = [name for name in FEATURES if measurable(metric, name)]
    require(
        set(suitable).intersection(features),
        f"metric {metric} cannot be measured on features {', '.join(features) or 'none'}; "
        f"use {', '.join(suitable)} or leave it out",
        MetricError,
    )


def _check_data_of(
    metric: str, data: str | None, labelled: bool, sizes: Mapping[str, int | None]
) -> None:
    """Refuse a metric that these images lack something for."""
    needs = METRICS[metric].needs
    images = f"data={data}" if data else "images from elsewhere"
    missing = ""
    if "labels" in needs and not labelled:
        missing = "requested classes or captions, unknown here"
    elif "probe" in needs and data != "scenes":
        missing = f"data=scenes, here are {images}"
    elif "train" in needs and (not data or sizes.get("train", 1) is None):
        missing = f"a finite set with a held-out split, here are {images}"
    if missing:
        raise MetricError(f"metric {metric} needs {missing}; leave it out of the metrics")


def _check_neighbours(options: EvalOptions, sizes: Mapping[str, int | None]) -> None:
    """Refuse precision and recall on fewer images than they have neighbours."""
    if not {"precision", "recall"}.intersection(options.metrics):
        return
    smallest = options.samples
    heldout = sizes.get("test")
    if not options.reference and heldout:
        smallest = min(smallest, heldout)
    require(
        smallest > options.neighbours,
        f"precision and recall with {options.neighbours} neighbours need more images than that, "
        f"got {smallest} (eval.samples={options.samples})",
        MetricError,
    )


def check_features(name: str, data: str | None) -> None:
    """Refuse an unknown extractor, and the classifier of another data set than `data`."""
    one_of("eval.features", name, list(FEATURES), MetricError)
    classifier_data = name.removesuffix("-classifier")
    if name.endswith("-classifier") and classifier_data != data:
        images = f"the data set {data}" if data else "no data set"
        alternatives = ", ".join(f for f in FEATURES if not f.endswith("-classifier"))
        raise MetricError(
            f"{name} is for data={classifier_data}, here is {images}; choose other features: "
            f"{alternatives}"
        )
