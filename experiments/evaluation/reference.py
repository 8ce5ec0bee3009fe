"""Reference statistics: those of the real images that samples are compared with.

ADM's reference files (`VIRTUAL_imagenet256_labeled.npz`) hold 10,000 images `arr_0` and, over the
whole training set, `mu` and `sigma` of the pooled and `mu_s` and `sigma_s` of the spatial Inception
features. Ours hold the same arrays, `rows` (the feature vectors, for precision, recall and KID) in
place of the images, and the identity of the feature network: a distance between features of two
different networks has no meaning, so it is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.evaluation.collect import collect
from experiments.evaluation.features import Features
from experiments.evaluation.images import Images, process_batches, read_arrays, split_indices
from experiments.options.evaluation import MetricError
from experiments.runtime.files import atomic_path, sha256
from experiments.runtime.processes import gather, share, world
from routing.errors import require


@dataclass(frozen=True)
class Reference:
    """Statistics of real images; None where a file lacks them."""

    name: str  # file name, or data set and split
    features: str  # extractor and checksum, as `inception-adm@6726825d`
    n: int = 0  # number of images behind `mu`
    mu: Any = None  # mean of the features, `(d,)` float64, and their covariance, `(d, d)`
    sigma: Any = None
    mu_s: Any = None  # the same of ADM's spatial features, d = 2023
    sigma_s: Any = None
    rows: Tensor | None = None  # feature vectors, `(n, d)` float32
    # SHA-256 of the file; for a held-out split, of what determines its statistics
    checksum: str = ""

    @property
    def label(self) -> str:
        """Name and start of the checksum, as a score stores it."""
        return f"{self.name}@{self.checksum[:8]}"


def save_reference(
    path: str | os.PathLike[str], features: Features, statistics: Mapping[str, Any], name: str
) -> Path:
    """Write collected statistics as an `.npz`, which ADM's evaluator reads too."""
    arrays = {key: np.asarray(value) for key, value in statistics.items()}
    arrays["features"] = np.asarray(np.str_(features.identity))
    arrays["name"] = np.asarray(np.str_(name))
    with atomic_path(path) as temporary:
        np.savez(temporary, allow_pickle=False, **arrays)
    return Path(path)


def load_reference(
    path: str | os.PathLike[str], features: Features, rows: bool = False, spatial: bool = False
) -> Reference:
    """Read an `.npz` of statistics, ADM's or our own; nothing is unpickled.

    Args:
        path: The file.
        features: The extractor of the samples.
        rows: Whether feature vectors are needed; they are computed where the file has images.
        spatial: Whether moments of the spatial features are needed.

    Raises:
        MetricError: A file of other features, without the needed arrays, or damaged.
    """
    path = Path(path).expanduser()
    fields = Reference.__dataclass_fields__.keys() - {"checksum"}
    arrays: dict[str, Any] = read_arrays(path, fields)
    _check_arrays(path, arrays, features, spatial)
    for key in ("name", "features", "n"):
        if key in arrays:
            arrays[key] = arrays[key].item()
    if "rows" in arrays:
        arrays["rows"] = torch.from_numpy(arrays["rows"]).float()
    elif rows:
        images = Images(path)
        arrays["rows"] = collect(features, images.batches(share(images.n)), ("rows",))["rows"]
    # ADM's files have neither name nor features.
    defaults = {"name": path.name, "features": features.identity}
    return Reference(**{**defaults, **arrays}, checksum=sha256(path))


def _check_arrays(
    path: Path, arrays: Mapping[str, np.ndarray], features: Features, spatial: bool
) -> None:
    """Refuse a file that cannot be compared with samples in these features."""
    missing = [key for key in ("mu", "sigma") if key not in arrays]
    require(
        not missing,
        f"{path} has no {' and '.join(missing)}; expected reference statistics as "
        "python experiments/evaluate.py SOURCE --write-reference FILE.npz writes them",
        MetricError,
    )
    # ADM's files do not name their features.
    sample_features = features.identity if "features" in arrays else features.name
    file_features = str(arrays.get("features", "inception-adm"))
    require(
        file_features == sample_features,
        f"{path} holds features {file_features}, the samples have {sample_features}; use "
        f"features {file_features.partition('@')[0]}, or write the reference again with those "
        "of the samples",
        MetricError,
    )
    require(
        not spatial or {"mu_s", "sigma_s"} <= arrays.keys(),
        f"{path} has no spatial statistics (mu_s, sigma_s), which sfid needs; leave out sfid",
        MetricError,
    )
    damaged = [key for key in arrays if not _is_valid(key, arrays[key], features.dim)]
    require(
        not damaged,
        f"{path} is damaged: {', '.join(damaged)} cannot be statistics of {features.name}'s "
        f"{features.dim} features; write the reference again",
        MetricError,
    )


def _is_valid(key: str, array: np.ndarray, dim: int) -> bool:
    """Return whether an array has the type and shape of its key in a file of `dim` features."""
    if key in ("name", "features"):
        return array.shape == () and array.dtype.kind == "U"
    if key == "n":
        return array.shape == () and array.dtype.kind in "iu"
    shapes = {"mu": (dim,), "sigma": (dim, dim), "rows": (*array.shape[:1], dim)}
    if key in shapes and array.shape != shapes[key]:
        return False
    return array.dtype.kind in "fiu" and bool(np.isfinite(array).all())


def heldout_reference(
    dataset: Any,
    features: Features,
    cache: str | os.PathLike[str],
    *,
    spatial: bool = False,
    split: str = "test",
) -> Reference:
    """Return the statistics of a data set's held-out split, from the cache or computed now.

    Its checksum is that of the images, the split and the network's weights, not of the file: the
    last digits of a covariance differ between machines, the images do not.
    """
    n = len(split_indices(dataset, split))
    network = features.identity.replace("@", "-")
    key = f"{dataset.name}-{dataset.pixels_fingerprint}-{split}{n}-{network}"
    path = Path(cache) / "references" / f"{key}{'-spatial' if spatial else ''}.npz"
    checksum = hashlib.sha256(f"{key} {features.checksum}".encode()).hexdigest()
    cached = None
    with contextlib.suppress(MetricError):  # absent, damaged, or of other features
        cached = load_reference(path, features, rows=True, spatial=spatial)
    # All processes must take the same path, so the cache is used only if all could read it.
    if all(gather(cached is not None)) and cached is not None:
        return dataclasses.replace(cached, checksum=checksum)
    names = ("moments", "rows", "spatial") if spatial else ("moments", "rows")
    statistics = collect(features, process_batches(dataset, split), names)
    if not world()[0]:
        save_reference(path, features, statistics, f"{dataset.name}-{split}")
    gather(None)  # wait for the file
    reference = load_reference(path, features, rows=True, spatial=spatial)
    return dataclasses.replace(reference, checksum=checksum)
