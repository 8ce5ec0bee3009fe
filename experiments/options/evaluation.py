"""What an evaluation measures: metrics, features, options, the names of scores (no torch here).

A score's name identifies it: `FID-5K (inception-adm)` and `FD-200 (digits-classifier)` are
different quantities, and neither is "the FID".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from annotated_types import Ge, Le

from backbones.validation import Choices, validate
from experiments.options.roles import config_defaults
from routing.errors import UserError, one_of

_CONF = Path(__file__).resolve().parents[1] / "conf" / "eval"


class MetricError(UserError):
    """A metric, its features or its reference cannot be measured as requested."""


@dataclass(frozen=True)
class Metric:
    """One measurable quantity."""

    # How it is written in a score's name; features may rename it (FD on Inception is FID)
    label: str
    # What must be there: `moments`, `rows` (all feature vectors), `logits`, `spatial`, `labels`,
    # `inception` (means something on Inception only), `pixels` (works on images, without a
    # network), `probe` (scenes), `model` (works on a model, without samples)
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

#: Needs of metrics that look at nothing through a feature extractor.
UNSEEN = {"probe", "pixels", "model"}

FEATURES: dict[str, str] = {
    "digits-classifier": "a small network trained on the digits' training split (8x8)",
    "fashion-classifier": "the same for fashion (32x32)",
    "mnist-classifier": "the same for mnist (32x32)",
    "icons-classifier": "the same for icons (32x32)",
    "torchvision-classifier": "the same for any set of data=torchvision (32x32)",
    "autoencoder": "a small autoencoder trained on the data set's training images, without labels",
    "scenes-probe": "the network that reads rendered scenes, which comes with the project (32x32)",
    "inception-adm": "Inception v3 of 2015 as ADM uses it: FID, sFID, IS, precision, recall",
    "dinov2-vitl14": "DINOv2 ViT-L/14 at 224 pixels: FD-DINOv2",
    "dinov2-vits14": "DINOv2 ViT-S/14 at 224 pixels: a faster FD, not the published FD-DINOv2",
}

# Features that give a metric a name of its own.
_RENAMED = {
    ("fd", "inception-adm"): "FID",
    ("kid", "inception-adm"): "KID",
    ("fd", "dinov2-vitl14"): "FD-DINOv2",
    ("fd", "dinov2-vits14"): "FD-DINOv2",
}


def full_name(metric: str, n: int, features: str | None) -> str:
    """Return a score's name with number and features, as `FID-5K (inception-adm)`."""
    # Parts of a metric (adherence_colour, memorisation_heldout) carry their own name.
    own = METRICS[metric].label if metric in METRICS else metric.replace("_", "-")
    label = _RENAMED.get((metric, features or ""), own)
    count = f"{n // 1000}K" if n >= 1000 and n % 1000 == 0 else str(n)  # 5K; but 500, 1200
    return f"{label}-{count}" + (f" ({features})" if features else "")


@dataclass(frozen=True)
class Score:
    """One measured number with everything that is needed to read it."""

    metric: str  # full name, as `FD-200 (digits-classifier)`
    key: str  # name of the metric in the code, as `fd`
    value: float
    n: int  # samples it was measured on
    features: str | None  # extractor and start of its checksum, as `digits-classifier@1f2e3d4c`
    reference: str | None  # what was compared with: name and start of its checksum, or None
    seed: int | None = None  # of the first sample
    # How it was sampled, as `cfg scale=1.5` and `heun steps=12`, from weights of which training
    # step, at how many multiply-adds per image; None for images from elsewhere
    guidance: str | None = None
    sampler: str | None = None
    step: int | None = None
    macs_per_sample: float | None = None
    better: str = "lower"  # `lower` or `higher`
    source: str | None = None  # where the images came from, if not from the run itself

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise MetricError(
                f"{self.metric} came out as {self.value}; the samples or the reference are broken"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON can hold them."""
        return asdict(self)


def scored(
    key: str,
    value: float,
    n: int,
    features: str | None,
    reference: str | None,
    record: dict[str, Any],
    space: str | None = None,
) -> Score:
    """Return a score with its full name, for features or another `space`, and its better end."""
    name = full_name(key, n, space or (features and features.partition("@")[0]))
    # Parts of a metric are like the whole.
    better = METRICS[key if key in METRICS else key.rsplit("_", 1)[0]].better
    return Score(name, key, value, n, features, reference, better=better, **record)


def defaults_for(data: str | None) -> dict[str, Any]:
    """Return the options of `conf/eval` that fit a data set: its own, or the Inception protocol."""
    path = _CONF / f"{data}.yaml"
    own = yaml.safe_load((path if path.is_file() else _CONF / "inception.yaml").read_text())
    values: dict[str, Any] = {}
    for parent in own.pop("defaults", ()):
        values |= config_defaults(EvalOptions) if parent == "base" else defaults_for(parent)
    return values | own


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


def options_for(config: Any, **changes: Any) -> EvalOptions:
    """Return a run's evaluation options with `changes` (None keeps the run's own).

    A run without a condition has nothing to adhere to: its own metrics lose accuracy and adherence.
    """
    given = {key: value for key, value in changes.items() if value is not None}
    # A run with eval=none is measured as its data usually are.
    values = {**defaults_for(config.data["name"]), **config.eval, **given}
    if config.task == "none" and "metrics" not in given:
        values["metrics"] = [m for m in values["metrics"] if m not in ("accuracy", "adherence")]
    return validate(EvalOptions, values, "eval.")


def measurable(metric: str, features: str) -> bool:
    """Return whether `metric` has a meaning on the extractor called `features`."""
    needs = METRICS[metric].needs
    if UNSEEN & set(needs):
        return False
    if "spatial" in needs or "inception" in needs:
        return features == "inception-adm"
    return "labels" not in needs or features.endswith("-classifier")


def plan_scores(
    options: EvalOptions, data: str | None, labelled: bool, sizes: Mapping[str, int | None]
) -> dict[str, tuple[str, ...]]:
    """Return which metrics are measured on which extractor, or refuse what cannot be.

    `data` is the images' data set, None for images from elsewhere; `labelled`: whether their
    classes or captions are known; `sizes` are those of its splits, {} where they are not known.
    """
    plan = {f: tuple(m for m in options.metrics if measurable(m, f)) for f in options.features}
    few = min(options.samples, (not options.reference and sizes.get("test")) or options.samples)
    have = f"data={data}" if data else "images from elsewhere"
    lacking = {
        "labels": not labelled and "requested classes or captions, unknown here",
        "probe": data != "scenes" and f"data=scenes, here are {have}",
        "train": (not data or sizes.get("train", 1) is None)
        and f"a finite set with a held-out split, here are {have}",
    }
    for metric in options.metrics:
        needs = METRICS[metric].needs
        if not UNSEEN & set(needs) and not any(metric in found for found in plan.values()):
            able = ", ".join(f for f in FEATURES if measurable(metric, f))
            have = ", ".join(options.features) or "none"
            raise MetricError(
                f"metric {metric} cannot be measured on features {have}; use {able} or leave it out"
            )
        if why := next(filter(None, map(lacking.get, needs)), None):
            raise MetricError(f"metric {metric} needs {why}; leave it out of the metrics")
        if metric in ("precision", "recall") and few <= options.neighbours:
            raise MetricError(
                f"precision and recall with {options.neighbours} neighbours need more images than "
                f"that, got {few} (eval.samples={options.samples})"
            )
    for features in (features for features, metrics in plan.items() if metrics):
        check_features(features, data)
    return plan


def check_features(name: str, data: str | None) -> None:
    """Refuse an unknown extractor, and the classifier of another data set than `data`."""
    one_of("eval.features", name, list(FEATURES), MetricError)
    wanted = name.removesuffix("-classifier")
    if name != wanted != data:
        have = f"the data set {data}" if data else "no data set"
        other = ", ".join(f for f in FEATURES if not f.endswith("-classifier"))
        raise MetricError(
            f"{name} is for data={wanted}, here is {have}; choose other features: {other}"
        )
