"""Statistics of real images: ADM's reference batches, and the same for any data set.

ADM's files (`VIRTUAL_imagenet256_labeled.npz`) hold 10,000 images `arr_0` and, over the whole
training set, `mu` and `sigma` of the pooled and `mu_s` and `sigma_s` of the spatial Inception
features. Ours hold the same arrays, `rows` (the feature vectors, for precision, recall and KID) in
place of the images, and say which features they are of: a distance between features of two networks
is a number without meaning, so it is refused.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.metrics.collect import (
    Collected,
    Features,
    collect,
    gather_rows,
    identity,
    main_first,
    share,
    world,
)
from experiments.metrics.eval_options import MetricError
from experiments.metrics.images import Images, array_names, own_images, read_arrays, split_indices
from experiments.runtime.files import atomic_path, sha256

_ARRAYS = ("mu", "sigma", "mu_s", "sigma_s", "rows", "n", "features", "name")


@dataclass(frozen=True)
class Reference:
    """What samples are compared with."""

    name: str  # file name, or data set and split
    features: str  # extractor and checksum, as `inception-adm@6726825d`
    n: int  # number of images behind `mu`; 0 where a file lacks it
    mu: np.ndarray  # mean of the features, `(d,)` float64, and their covariance, `(d, d)`
    sigma: np.ndarray
    mu_s: np.ndarray | None  # the same of ADM's spatial features, d = 2023, or None
    sigma_s: np.ndarray | None
    rows: Tensor | None  # feature vectors, `(n, d)` float32, or None
    checksum: str  # SHA-256 of the file

    @property
    def label(self) -> str:
        """Name and start of the checksum, as a score stores it."""
        return f"{self.name}@{self.checksum[:8]}"


def save(path: str | os.PathLike[str], features: Features, found: Collected, name: str) -> Path:
    """Write the statistics of features as an `.npz` that `load` and ADM's evaluator read."""
    if found.moments is None:
        raise MetricError(
            f"no moments were collected for {path}; collect with wanted=('moments', ...)"
        )
    mu, sigma = found.moments.finish()
    arrays: dict[str, Any] = {"mu": mu, "sigma": sigma}
    if found.spatial is not None:
        arrays["mu_s"], arrays["sigma_s"] = found.spatial.finish()
    if found.rows is not None:
        arrays["rows"] = found.rows.numpy()
    arrays |= {
        "n": np.int64(found.n),
        "features": np.str_(identity(features)),
        "name": np.str_(name),
    }
    with atomic_path(path) as temporary:
        np.savez(temporary, allow_pickle=False, **arrays)
    return Path(path)


def load(
    path: str | os.PathLike[str], features: Features, rows: bool = False, spatial: bool = False
) -> Reference:
    """Read an `.npz` of statistics, ADM's or our own; nothing is unpickled.

    Where `rows` (feature vectors) are needed and it has images instead, they are computed. A file
    of other `features` than the samples' is refused, as a damaged one and missing arrays are.
    """
    path = Path(path).expanduser()
    present = array_names(path)
    arrays = read_arrays(path, [k for k in _ARRAYS if k in present])
    _check(path, arrays, features)
    if spatial and not {"mu_s", "sigma_s"} <= arrays.keys():
        raise MetricError(
            f"{path} has no spatial statistics (mu_s, sigma_s), which sfid needs; leave out sfid"
        )
    vectors = torch.from_numpy(arrays["rows"]).float() if "rows" in arrays else None
    if rows and vectors is None:
        if "arr_0" not in present:
            raise MetricError(
                f"{path} has neither feature rows nor images (arr_0), "
                "which precision, recall and kid need; leave them out or take one with images"
            )
        images = Images(path)
        vectors = collect(features, images.batches(share(images.n)), ("rows",)).rows
    return Reference(
        str(arrays["name"]) if "name" in arrays else path.name,
        str(arrays["features"]) if "features" in arrays else identity(features),
        int(arrays["n"]) if "n" in arrays else 0,
        arrays["mu"], arrays["sigma"], arrays.get("mu_s"), arrays.get("sigma_s"),
        vectors, sha256(path),
    )  # fmt: skip


def _check(path: Path, arrays: dict[str, Any], features: Features) -> None:
    missing = [key for key in ("mu", "sigma") if key not in arrays]
    if missing:
        raise MetricError(
            f"{path} has no {' and '.join(missing)}; expected reference statistics as "
            "python experiments/evaluate.py SOURCE --write-reference FILE.npz writes them"
        )
    if "features" in arrays and str(arrays["features"]) != identity(features):
        raise MetricError(
            f"{path} holds features {arrays['features']}, the samples have {identity(features)}; "
            "write the reference again with these features"
        )
    dim = arrays["mu"].shape[0] if arrays["mu"].ndim == 1 else -1
    if "features" not in arrays and features.name != "inception-adm":
        raise MetricError(
            f"{path} is a reference of ADM's kind ({dim} Inception features), "
            f"the samples have {features.name}; use features inception-adm"
        )
    if dim != features.dim or arrays["sigma"].shape != (dim, dim):
        raise MetricError(
            f"{path} holds statistics of {max(dim, 0)} features, {features.name} has "
            f"{features.dim}; write the reference again with these features"
        )
    wrong = [
        key
        for key, value in arrays.items()
        if key not in ("features", "name")
        and (value.dtype.kind not in "fiu" or not bool(np.isfinite(value).all()))
    ]
    rows, n = arrays.get("rows"), arrays.get("n")
    if rows is not None and (rows.ndim != 2 or rows.shape[1] != dim):
        wrong.append("rows")
    if n is not None and (n.ndim or n.dtype.kind not in "iu" or n < 0):
        wrong.append("n")
    if wrong:
        raise MetricError(
            f"{path} is damaged: {', '.join(dict.fromkeys(wrong))} cannot be statistics of "
            f"{dim} features; write the reference again"
        )


def heldout(
    dataset: Any,
    features: Features,
    cache: str | os.PathLike[str],
    *,
    spatial: bool = False,
    split: str = "test",
) -> Reference:
    """Return the statistics of a data set's held-out split, from the cache or computed now."""
    n = len(split_indices(dataset, split))
    of = identity(features).replace("@", "-")
    key = f"{dataset.name}-{dataset.pixels_fingerprint}-{split}{n}-{of}"
    path = Path(cache) / "references" / f"{key}{'-spatial' if spatial else ''}.npz"
    kept = None
    with contextlib.suppress(MetricError):  # damaged, or of other features
        kept = load(path, features, rows=True, spatial=spatial) if path.is_file() else None
    # All processes decide alike, whichever of them saw the file first.
    found_by_all = gather_rows(torch.tensor([kept is not None])).all()
    if kept is not None and found_by_all:
        return kept
    wanted = ("moments", "rows", "spatial") if spatial else ("moments", "rows")
    found = collect(features, own_images(dataset, split), wanted)
    if not world()[0]:
        save(path, features, found, f"{dataset.name}-{split}")
    with main_first():
        return load(path, features, rows=True, spatial=spatial)
