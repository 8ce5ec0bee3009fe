"""What can be measured, on which features, and how a score is called (no torch here).

A score's name says what it is: `FID-5K (inception-adm)` and `FD-200 (digits-classifier)` are
different quantities, and neither is "the FID".
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from routing.errors import UserError, suggest


class MetricError(UserError):
    """A metric, its features or its reference was asked for in a way that cannot be measured."""


@dataclass(frozen=True)
class Metric:
    """One measurable quantity.

    Attributes:
        label: How it is written in a score's name; features may rename it (FD on Inception is FID).
        needs: What must be there: `moments`, `rows` (all feature vectors), `logits`, `spatial`,
            `labels`, `inception` (means something on Inception only), `pixels` (works on images,
            without a network), `probe` (scenes).
        better: `lower` or `higher`.
        help: One line for `--help` and error messages.
    """

    label: str
    needs: tuple[str, ...]
    better: str
    help: str


METRICS: dict[str, Metric] = {
    "fd": Metric("FD", ("moments",), "lower", "Frechet distance to the reference's features"),
    "sfid": Metric("sFID", ("spatial",), "lower", "Frechet distance on ADM's spatial features"),
    "is": Metric("IS", ("logits", "inception"), "higher", "Inception Score, splits of 5000 as ADM"),
    "precision": Metric(
        "precision", ("rows",), "higher", "share of samples inside the reference's k-NN manifold"
    ),
    "recall": Metric(
        "recall", ("rows",), "higher", "share of the reference inside the samples' k-NN manifold"
    ),
    "kid": Metric("KD", ("rows",), "lower", "kernel distance, polynomial kernel, unbiased"),
    "accuracy": Metric(
        "accuracy", ("labels", "logits"), "higher", "share taken for the class asked for"
    ),
    "adherence": Metric(
        "adherence", ("probe",), "higher", "share of samples that show what was asked for"
    ),
    "memorisation": Metric(
        "memorisation",
        ("rows", "train"),
        "higher",
        "distance to nearest training over nearest held-out image",
    ),
    "memorisation_pixels": Metric(
        "memorisation-pixels", ("pixels", "train"), "higher", "the same ratio in pixels"
    ),
}

FEATURES: dict[str, str] = {
    "digits-classifier": "a small network trained on the digits' training split (8x8)",
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


def check_metrics(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return `names` if all are metrics.

    Raises:
        MetricError: A name is none; the message lists what there is.
    """
    for name in names:
        if name not in METRICS:
            known = ", ".join(METRICS)
            guess = "; did you mean fd?" if name.lower() == "fid" else suggest(name, METRICS)
            raise MetricError(f"unknown metric {name!r}: there are {known}{guess}")
    if not names:
        raise MetricError(f"no metric was asked for; name some of {', '.join(METRICS)}")
    return tuple(names)


def check_features(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return `names` if all are feature extractors.

    Raises:
        MetricError: A name is none; the message lists what there is.
    """
    for name in names:
        if name not in FEATURES:
            known = ", ".join(FEATURES)
            raise MetricError(
                f"unknown features {name!r}: there are {known}{suggest(name, FEATURES)}"
            )
    return tuple(names)


def count_label(n: int) -> str:
    """Return `5K` for 5000, `500` for 500 and `1200` for 1200."""
    return f"{n // 1000}K" if n >= 1000 and n % 1000 == 0 else str(n)


def direction(metric: str) -> str:
    """Return `lower` or `higher`: which is better; parts of a metric are like the whole."""
    return METRICS[metric if metric in METRICS else metric.rsplit("_", 1)[0]].better


def full_name(metric: str, n: int, features: str | None) -> str:
    """Return a score's name with number and features, as `FID-5K (inception-adm)`."""
    label = _RENAMED.get((metric, features or ""))
    if label is None:
        # Parts of a metric (adherence_colour, memorisation_heldout) carry their own name.
        label = METRICS[metric].label if metric in METRICS else metric.replace("_", "-")
    return f"{label}-{count_label(n)}" + (f" ({features})" if features else "")


@dataclass(frozen=True)
class Score:
    """One measured number with everything that is needed to read it.

    Attributes:
        metric: Full name, as `FD-200 (digits-classifier)`.
        key: Name of the metric in the code, as `fd`.
        value: The number.
        n: Samples it was measured on.
        features: Extractor and the start of its weights' checksum, as `digits-classifier@1f2e3d4c`.
        reference: What was compared with: name and the start of its checksum; None where nothing
            was.
        seed: Seed of the first sample.
        guidance: How it was sampled, as `cfg scale=1.5`; None for images from elsewhere.
        sampler: Sampler and steps, as `heun steps=12`; None for images from elsewhere.
        step: Training step of the weights; None for images from elsewhere.
        macs_per_sample: Multiply-adds to sample one image; None for images from elsewhere.
        better: `lower` or `higher`.
        source: Where the images came from, if not from the run itself.
    """

    metric: str
    key: str
    value: float
    n: int
    features: str | None
    reference: str | None
    seed: int | None = None
    guidance: str | None = None
    sampler: str | None = None
    step: int | None = None
    macs_per_sample: float | None = None
    better: str = "lower"
    source: str | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise MetricError(
                f"{self.metric} came out as {self.value}; the samples or the reference are broken"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON can hold them."""
        return asdict(self)
