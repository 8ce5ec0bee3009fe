"""Options of an evaluation (no torch here)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.metrics.metric_names import MetricError, check_features, check_metrics
from routing.errors import suggest

LABELS = ("balanced", "random")
_CONF = Path(__file__).resolve().parents[1] / "conf" / "eval"


def defaults_for(data: str | None) -> dict[str, Any]:
    """Return the options of `conf/eval` that fit a data set: its own, or the Inception protocol."""
    return _read(str(data) if (_CONF / f"{data}.yaml").is_file() else "inception")


def _read(name: str) -> dict[str, Any]:
    """Return one file's options, on top of those of the files that it names as its defaults."""
    import yaml

    own = yaml.safe_load((_CONF / f"{name}.yaml").read_text())
    values: dict[str, Any] = {}
    for parent in own.pop("defaults", ()):
        values |= _read(parent)
    return values | own


@dataclass(frozen=True)
class EvalOptions:
    """What is measured, on how many samples and against what; one YAML file in `conf/eval` each.

    Attributes:
        name: Of the file.
        every: Steps between scores while training; 0 scores only at the end.
        samples: Samples per evaluation.
        features: Feature extractors, names of `names.FEATURES`.
        metrics: Metrics, names of `names.METRICS`; each is measured on every extractor that can.
        labels: `balanced` (class i mod classes) or `random` (drawn per seed).
        seed: Seed of the first sample; sample i has seed `seed + i`.
        batch: Images per sampling batch and process.
        reference: Statistics (`.npz`) to compare with; None: the data set's held-out split.
        neighbours: k of precision and recall.
        kid_subsets: Number of subsets that the kernel distance averages over.
        kid_subset_size: Samples in each of them, at most.
        inception_weights: File with torch-fidelity's Inception weights; None: the cache, else a
            download.
        dinov2_weights: File with DINOv2 weights; None: timm's own cache, else a download.
    """

    name: str = "digits"
    every: int = 0
    samples: int = 500
    features: tuple[str, ...] = ("digits-classifier",)
    metrics: tuple[str, ...] = ("fd", "accuracy")
    labels: str = "balanced"
    seed: int = 100000
    batch: int = 250
    reference: str | None = None
    neighbours: int = 3
    kid_subsets: int = 100
    kid_subset_size: int = 1000
    inception_weights: str | None = None
    dinov2_weights: str | None = None

    def __post_init__(self) -> None:
        for name in ("features", "metrics"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        check_features(self.features)
        check_metrics(self.metrics)
        if self.labels not in LABELS:
            raise MetricError(
                f"eval.labels={self.labels}: choose {' or '.join(LABELS)}"
                f"{suggest(self.labels, LABELS)}"
            )
        floors = {
            "every": 0, "samples": 2, "seed": 0, "batch": 1,
            "neighbours": 1, "kid_subsets": 1, "kid_subset_size": 2,
        }  # fmt: skip
        for name, floor in floors.items():
            value = getattr(self, name)
            most = 2**62 if name == "seed" else 10**7
            if type(value) is not int or not floor <= value <= most:
                raise MetricError(
                    f"eval.{name}={value!r}: expected a whole number of {floor} or more, at most "
                    f"{most}"
                )
