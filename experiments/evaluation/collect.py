"""From batches of images to numbers: what is collected of their features, references, and meters.

ADM's reference files (`VIRTUAL_imagenet256_labeled.npz`) hold 10,000 images `arr_0` and, over the
whole training set, `mu` and `sigma` of the pooled and `mu_s` and `sigma_s` of the spatial Inception
features. Ours hold the same arrays, `rows` (the feature vectors, for precision, recall and KID) in
place of the images, and say which features they are of: a distance between features of two networks
is a number without meaning, so it is refused.

Networks and references are loaded before anything is sampled, so that an evaluation fails early.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.data.dataset import Device
from experiments.data.probe import adherence
from experiments.evaluation import distances
from experiments.evaluation.features import Features, create_features, identity, pixel_features
from experiments.evaluation.images import (
    Images,
    read_arrays,
    split_batches,
    split_indices,
    whole_split,
)
from experiments.options.evaluation import (
    METRICS,
    EvalOptions,
    MetricError,
    Score,
    make_score,
    plan_scores,
)
from experiments.runtime.files import atomic_path, sha256
from experiments.runtime.processes import gather, gather_rows, share, world

# --- what is collected ----------------------------------------------------------------------------


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """Switch off autocast and TF32 inside the block: both move the digits of a distance."""
    matmul, convolution = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = convolution


# Parts of a collection whose moments are kept: the features that they are of, and a suffix.
_MOMENTS = {"moments": ("features", ""), "spatial": ("spatial", "_s")}
# Parts that are kept whole: the features that they are of.
_ROWS = {"rows": "features", "logits": "logits"}


class Collector:
    """Takes in batches of images and keeps the `wanted` parts of their features.

    These are `moments` and `spatial` (of the features, and of ADM's spatial ones), all feature
    vectors as `rows`, and `logits`.
    """

    def __init__(self, features: Features, wanted: Collection[str]) -> None:
        self.features, self.wanted = features, set(wanted)
        self.n = 0
        self._sums: dict[str, distances.Moments] = {}
        self._rows: dict[str, list[Tensor]] = {}

    def update(self, images: Tensor, *conditions: Any) -> None:
        """Take in a uint8 batch of shape `(B, 3, H, W)`; labels and captions make no difference."""
        with exact():
            found = self.features(images)
        self.n += len(images)
        for key in self.wanted & _MOMENTS.keys():
            rows = found[_MOMENTS[key][0]]
            if key not in self._sums:
                self._sums[key] = distances.Moments(rows.shape[1], self.features.device)
            self._sums[key].update(rows)
        for key in self.wanted & _ROWS.keys():
            self._rows.setdefault(key, []).append(found[_ROWS[key]].float().cpu())

    def merged(self) -> dict[str, Any]:
        """Return what all processes collected, in rank order; a collective call.

        Returns:
            The number of images `n`, and what was wanted: `mu` (d,) and `sigma` (d, d) of the
            features, `mu_s` and `sigma_s` of the spatial ones as float64 arrays, `rows` (n, d) and
            `logits` (n, classes) as float32 on the CPU.

        Raises:
            MetricError: A process has seen no image, and does not know the widths.
        """
        counts = gather_rows(torch.tensor([self.n]))
        if not bool(counts.all()):
            raise MetricError(
                f"{int(counts.sum())} images are fewer than {len(counts)} processes; give more "
                "images or fewer processes"
            )
        found: dict[str, Any] = {}
        # In the tables' order: all processes have to gather the same.
        for key, (_, suffix) in _MOMENTS.items():
            if own := self._sums.get(key):
                total = distances.Moments(len(own.mean))
                for part in gather((own.n, own.mean.cpu(), own.scatter.cpu())):
                    total.merge_parts(*part)
                found[f"mu{suffix}"], found[f"sigma{suffix}"] = total.finish()
        for key in [key for key in _ROWS if key in self._rows]:
            found[key] = gather_rows(torch.cat(self._rows[key]))
        return found | {"n": int(counts.sum())}


def collect(
    features: Features, images: Iterable[Tensor], wanted: Collection[str] = ("moments", "rows")
) -> dict[str, Any]:
    """Run `features` over uint8 batches (B, 3, H, W); each process brings its own part."""
    collector = Collector(features, wanted)
    for batch in images:
        collector.update(batch)
    return collector.merged()


def own_images(dataset: Any, split: str) -> Iterator[Tensor]:
    """Yield this process's part of a split as uint8 batches of shape `(B, 3, H, W)`."""
    index = split_indices(dataset, split)
    mine = share(len(index))
    return (pixels for pixels, _ in split_batches(dataset, split, index[mine.start : mine.stop]))


# --- reference statistics -------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """What samples are compared with: statistics of real images, None where a file lacks them."""

    name: str  # file name, or data set and split
    features: str  # extractor and checksum, as `inception-adm@6726825d`
    n: int = 0  # number of images behind `mu`
    mu: Any = None  # mean of the features, `(d,)` float64, and their covariance, `(d, d)`
    sigma: Any = None
    mu_s: Any = None  # the same of ADM's spatial features, d = 2023
    sigma_s: Any = None
    rows: Tensor | None = None  # feature vectors, `(n, d)` float32
    checksum: str = ""  # SHA-256 of the file; of a held-out split, of what decides its statistics

    @property
    def label(self) -> str:
        """Name and start of the checksum, as a score stores it."""
        return f"{self.name}@{self.checksum[:8]}"


def save_reference(
    path: str | os.PathLike[str], features: Features, found: dict[str, Any], name: str
) -> Path:
    """Write what was collected as an `.npz`, which ADM's evaluator reads too."""
    about = {"features": np.str_(identity(features)), "name": np.str_(name)}
    arrays = {key: np.asarray(value) for key, value in {**found, **about}.items()}
    with atomic_path(path) as temporary:
        np.savez(temporary, allow_pickle=False, **arrays)
    return Path(path)


def load_reference(
    path: str | os.PathLike[str], features: Features, rows: bool = False, spatial: bool = False
) -> Reference:
    """Read an `.npz` of statistics, ADM's or our own; nothing is unpickled.

    Where `rows` (feature vectors) are needed and it has images instead, they are computed. A file
    of other `features` than the samples' is refused, as a damaged one and missing arrays are.
    """
    path = Path(path).expanduser()
    fields = Reference.__dataclass_fields__.keys() - {"checksum"}
    arrays: dict[str, Any] = read_arrays(path, fields)
    if missing := [key for key in ("mu", "sigma") if key not in arrays]:
        raise MetricError(
            f"{path} has no {' and '.join(missing)}; expected reference statistics as "
            "python experiments/evaluate.py SOURCE --write-reference FILE.npz writes them"
        )
    # ADM's files do not say it.
    ours = identity(features) if "features" in arrays else features.name
    theirs = str(arrays.get("features", "inception-adm"))
    if theirs != ours:
        raise MetricError(
            f"{path} holds features {theirs}, the samples have {ours}; use features "
            f"{theirs.partition('@')[0]}, or write the reference again with those of the samples"
        )
    if spatial and not {"mu_s", "sigma_s"} <= arrays.keys():
        raise MetricError(
            f"{path} has no spatial statistics (mu_s, sigma_s), which sfid needs; leave out sfid"
        )
    if wrong := [key for key, value in arrays.items() if not _is_good(key, value, features.dim)]:
        raise MetricError(
            f"{path} is damaged: {', '.join(wrong)} cannot be statistics of {features.name}'s "
            f"{features.dim} features; write the reference again"
        )
    arrays |= {key: arrays[key].item() for key in ("name", "features", "n") if key in arrays}
    if "rows" in arrays:
        arrays["rows"] = torch.from_numpy(arrays["rows"]).float()
    elif rows:
        images = Images(path)
        arrays["rows"] = collect(features, images.batches(share(images.n)), ("rows",))["rows"]
    told = {"name": path.name, "features": identity(features), **arrays}
    return Reference(**told, checksum=sha256(path))


def _is_good(key: str, value: np.ndarray, dim: int) -> bool:
    """Return whether an array can be what its name in a file of `dim` features says."""
    shapes = {"mu": (dim,), "sigma": (dim, dim), "rows": (*value.shape[:1], dim)}
    if value.shape != shapes.get(key, value.shape if key.endswith("_s") else ()):
        return False
    if key in ("name", "features"):
        return value.dtype.kind == "U"
    return value.dtype.kind in ("iu" if key == "n" else "fiu") and bool(np.isfinite(value).all())


def heldout_reference(
    dataset: Any,
    features: Features,
    cache: str | os.PathLike[str],
    *,
    spatial: bool = False,
    split: str = "test",
) -> Reference:
    """Return the statistics of a data set's held-out split, from the cache or computed now.

    Its checksum is made of the images, the split and the network's weights, not of the file: the
    last digits of a covariance differ between machines, what samples are compared with does not.
    """
    n = len(split_indices(dataset, split))
    of = identity(features).replace("@", "-")
    key = f"{dataset.name}-{dataset.pixels_fingerprint}-{split}{n}-{of}"
    path = Path(cache) / "references" / f"{key}{'-spatial' if spatial else ''}.npz"
    checksum = hashlib.sha256(f"{key} {features.checksum}".encode()).hexdigest()
    kept = None
    with contextlib.suppress(MetricError):  # absent, damaged, or of other features
        kept = load_reference(path, features, rows=True, spatial=spatial)
    # All processes decide alike, whichever of them saw the file first.
    if all(gather(kept is not None)) and kept is not None:
        return dataclasses.replace(kept, checksum=checksum)
    wanted = ("moments", "rows", "spatial") if spatial else ("moments", "rows")
    found = collect(features, own_images(dataset, split), wanted)
    if not world()[0]:
        save_reference(path, features, found, f"{dataset.name}-{split}")
    gather(None)  # the file is there
    reference = load_reference(path, features, rows=True, spatial=spatial)
    return dataclasses.replace(reference, checksum=checksum)


# --- meters ---------------------------------------------------------------------------------------


_LARGEST_PIXELS = 64
# Metrics that compare with nothing.
_ALONE = ("accuracy", "is")


class Meter(Collector):
    """The metrics of one extractor, against a reference where one compares.

    `train` are features of training images `(T, d)`, for memorisation.
    """

    def __init__(
        self,
        features: Features,
        metrics: Sequence[str],
        options: EvalOptions,
        reference: Reference | None = None,
        train: Tensor | None = None,
    ) -> None:
        needs = {need for metric in metrics for need in METRICS[metric].needs}
        super().__init__(features, needs & (_MOMENTS.keys() | _ROWS.keys()))
        self.metrics, self.options = tuple(metrics), options
        self.reference, self.train = reference, train
        self.note = features.note  # a line for the log, as the classifier's accuracy

    def results(self, labels: Tensor | None = None, **record: Any) -> list[Score]:
        """Return the scores over all processes; a collective call."""
        found, values = self.merged(), dict[str, float]()
        with exact():
            for metric in self.metrics:
                if metric not in values:
                    values |= self._measure(metric, found, labels)
        network = None if self.features.name == "pixels" else identity(self.features)
        label = None if self.reference is None else self.reference.label
        return [
            make_score(key, value, found["n"], network, None if key in _ALONE else label, record)
            for key, value in values.items()
        ]

    def _measure(
        self, metric: str, found: dict[str, Any], labels: Tensor | None
    ) -> dict[str, float]:
        """Return the numbers of one metric; what it needs was collected and loaded before."""
        real: Any = self.reference
        o, device = self.options, self.features.device
        if metric == "fd":
            theirs = real.mu, real.sigma
            return {"fd": distances.frechet_distance(found["mu"], found["sigma"], *theirs)}
        if metric == "sfid":
            theirs = real.mu_s, real.sigma_s
            return {"sfid": distances.frechet_distance(found["mu_s"], found["sigma_s"], *theirs)}
        if metric == "is":
            return {"is": distances.inception_score(found["logits"])}
        if metric == "accuracy":
            assert labels is not None, "plan_scores refused images without classes"
            right = found["logits"].argmax(dim=1) == labels.cpu()
            return {"accuracy": right.double().mean().item()}
        rows, real_rows = found["rows"].to(device), real.rows.to(device)
        if metric == "kid":
            subsets = o.kid_subsets, o.kid_subset_size
            return {"kid": distances.kernel_distance(rows, real_rows, *subsets)}
        if metric in ("precision", "recall"):
            # One pass over the distances gives both.
            both = distances.precision_recall(rows, real_rows, o.neighbours)
            named = zip(("precision", "recall"), both, strict=True)
            return {key: value for key, value in named if key in self.metrics}
        assert self.train is not None, metric
        ratio, fresh = distances.memorisation(rows, self.train.to(device), real_rows)
        return {metric: ratio, f"{metric}_heldout": fresh}


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
        total = gather_rows(packed).sum(dim=0)
        shares = (total[1:, 0] / total[1:, 1].clamp_min(1)).tolist()
        main, n = next(iter(self._sums)), int(total[0, 0])
        names = ["adherence" if key == main else f"adherence_{key}" for key in self._sums]
        return [
            make_score(name, value, n, None, None, record, space="scenes-probe")
            for name, value in zip(names, shares, strict=True)
        ]


def pixel_meter(dataset: Any, options: EvalOptions, device: Device = "cpu") -> Meter:
    """Return the meter of `memorisation_pixels`."""
    held, _ = whole_split(dataset, "test")
    if max(held.shape[-2:]) > _LARGEST_PIXELS:
        raise MetricError(
            f"memorisation_pixels compares images up to {_LARGEST_PIXELS} pixels wide, these are "
            f"{held.shape[-1]}; use memorisation on features"
        )
    features = pixel_features((held.shape[-2], held.shape[-1]), device)
    rows, about = features(held)["features"].cpu(), (f"{dataset.name}-test", identity(features))
    reference = Reference(*about, len(held), rows=rows, checksum=dataset.fingerprint)
    train = collect(features, own_images(dataset, "train"), ("rows",))["rows"]
    return Meter(features, ("memorisation_pixels",), options, reference, train)


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
        needs = {need for metric in metrics for need in METRICS[metric].needs}
        if not needs:
            continue
        features = create_features(
            name, options, cache=cache, dataset=dataset, device=device, data=data
        )
        real: Any = None
        train, spatial = None, "spatial" in needs
        # A file holds the statistics of one extractor: the main one's.
        if not needs & {"moments", "rows", "spatial"}:
            pass
        elif options.reference is not None and name == options.features[0]:
            real = load_reference(options.reference, features, "rows" in needs, spatial)
        elif dataset is not None:
            real = heldout_reference(dataset, features, cache, spatial=spatial)
        else:
            raise MetricError(
                f"{', '.join(metrics)} compare with real images: pass --reference FILE.npz, "
                "or --data NAME for a data set's held-out split"
            )
        if {"precision", "recall"} & set(metrics):  # refuses too few, early
            distances.radii(real.rows[: options.neighbours + 1], options.neighbours)
        if "train" in needs:
            train = heldout_reference(dataset, features, cache, split="train").rows
        made.append(Meter(features, metrics, options, real, train))
    for metric in alone:
        pixels = metric == "memorisation_pixels"
        made.append(pixel_meter(dataset, options, device) if pixels else AdherenceMeter())
    return made
