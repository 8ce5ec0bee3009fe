"""Statistics of images' features: one pass on all processes, and reference files such as ADM's.

ADM's files (`VIRTUAL_imagenet256_labeled.npz`) hold 10,000 images `arr_0` and, over the whole
training set, `mu` and `sigma` of the pooled and `mu_s` and `sigma_s` of the spatial Inception
features. Ours hold the same arrays, `rows` (the feature vectors, for precision, recall and KID) in
place of the images, and say which features they are of: a distance between features of two networks
is a number without meaning, so it is refused.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.metrics.distances import Moments
from experiments.metrics.eval_options import MetricError
from experiments.metrics.images import Images, array_names, read_arrays, split_images, split_indices
from experiments.runtime.files import atomic_path, sha256


def world() -> tuple[int, int]:
    """Return (rank, number of processes)."""
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def share(n: int, rank: int | None = None) -> range:
    """Return a process's part of `n` items: consecutive, in rank order, of nearly equal size."""
    own, size = world()
    rank = own if rank is None else rank
    return range(n * rank // size, n * (rank + 1) // size)


def own_images(dataset: Any, split: str) -> Iterator[Tensor]:
    """Yield this process's part of a split, as `split_images` does."""
    index = split_indices(dataset, split)
    mine = share(len(index))
    return split_images(dataset, split, index[mine.start : mine.stop])


@contextlib.contextmanager
def main_first() -> Iterator[None]:
    """Let the first process go through the block alone, then the others: a cache is filled once."""
    rank, size = world()
    if size > 1 and rank:
        torch.distributed.barrier()
    try:
        yield
    finally:
        if size > 1 and not rank:
            torch.distributed.barrier()


def gather(own: Any) -> list[Any]:
    """Return every process's `own`, in rank order; a collective call."""
    parts = [own] * world()[1]
    if len(parts) > 1:
        torch.distributed.all_gather_object(parts, own)
    return parts


def gather_rows(own: Tensor) -> Tensor:
    """Return every process's rows (n, ...), in rank order, on the CPU; n may differ."""
    parts = gather(own.cpu())
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def merge_moments(own: Moments) -> Moments:
    """Return the moments over all processes, merged in rank order: the same numbers everywhere."""
    total = Moments(own.dim)
    for part in gather((own.n, own.mean.cpu(), own.scatter.cpu())):
        total.merge_parts(*part)
    return total


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


class Features:
    """A feature extractor: a subclass says in `measure` what it sees of images."""

    name: str  # one of `eval_options.FEATURES`
    dim: int  # length of a feature vector
    checksum: str  # SHA-256 of its weights
    provides: tuple[str, ...] = ("features",)  # what a call returns: also `logits`, `spatial`
    device = torch.device("cpu")  # where it runs
    note = ""  # a line for the log, as the classifier's accuracy

    @torch.no_grad()
    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """Return what `measure` sees of images on any device; see there."""
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
            raise MetricError(
                "features take uint8 images of shape (B, 3, H, W), "
                f"got {images.dtype} {tuple(images.shape)}"
            )
        return self.measure(images.to(self.device))

    def measure(self, images: Tensor) -> dict[str, Tensor]:
        """Return float32 `features` `(B, dim)`, and `logits` and `spatial` rows where provided.

        Args:
            images: uint8 with shape `(B, 3, H, W)`, on the extractor's device.
        """
        raise NotImplementedError


def identity(features: Features) -> str:
    """Return name and start of the weights' checksum, as `digits-classifier@1f2e3d4c`."""
    return f"{features.name}@{features.checksum[:8]}"


@dataclass
class Collected:
    """What was wanted of the features of a set of images."""

    n: int  # number of images
    moments: Moments | None = None  # of the features
    spatial: Moments | None = None  # of ADM's spatial features
    rows: Tensor | None = None  # all feature vectors, `(n, d)` float32 on the CPU
    logits: Tensor | None = None  # `(n, classes)` float32 on the CPU


# What a feature extractor returns, for each part of a collection.
_SOURCES = {"moments": "features", "spatial": "spatial", "rows": "features", "logits": "logits"}


class Collector:
    """Takes in batches of images and keeps the parts of a collection that are wanted."""

    def __init__(self, features: Features, wanted: Collection[str]) -> None:
        self.features, self.wanted = features, set(wanted)
        self.n = 0
        self._sums: dict[str, Moments] = {}
        self._rows: dict[str, list[Tensor]] = {}

    def update(self, images: Tensor, *conditions: Any) -> None:
        """Take in a uint8 batch of shape `(B, 3, H, W)`; labels and captions make no difference."""
        with exact():
            found = self.features(images)
        self.n += len(images)
        for key in self.wanted:
            rows = found[_SOURCES[key]]
            if key in ("rows", "logits"):
                self._rows.setdefault(key, []).append(rows.float().cpu())
            else:
                if key not in self._sums:
                    self._sums[key] = Moments(rows.shape[1], self.features.device)
                self._sums[key].update(rows)

    def merged(self) -> Collected:
        """Return what all processes collected, in rank order; a collective call.

        Raises:
            MetricError: A process has seen no image, and does not know the widths.
        """
        counts = gather_rows(torch.tensor([self.n]))
        if not bool(counts.all()):
            raise MetricError(
                f"{int(counts.sum())} images are fewer than {len(counts)} processes; give more "
                "images or fewer processes"
            )
        # In an order of our own: all processes have to gather the same.
        found: dict[str, Any] = {key: merge_moments(v) for key, v in sorted(self._sums.items())}
        found |= {key: gather_rows(torch.cat(v)) for key, v in sorted(self._rows.items())}
        return Collected(int(counts.sum()), **found)


def collect(
    features: Features, images: Iterable[Tensor], wanted: Collection[str] = ("moments", "rows")
) -> Collected:
    """Run `features` over uint8 batches (B, 3, H, W); each process brings its own part."""
    collector = Collector(features, wanted)
    for batch in images:
        collector.update(batch)
    return collector.merged()


# --- reference statistics -------------------------------------------------------------------------


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


def save_reference(
    path: str | os.PathLike[str], features: Features, found: Collected, name: str
) -> Path:
    """Write the statistics of features as an `.npz`, which ADM's evaluator reads too."""
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
    arrays |= {"n": np.int64(found.n), "features": np.str_(identity(features))}
    arrays["name"] = np.str_(name)
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
    present = array_names(path)
    arrays = read_arrays(path, [k for k in _ARRAYS if k in present])
    _check_reference(path, arrays, features)
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


def _check_reference(path: Path, arrays: dict[str, Any], features: Features) -> None:
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


def heldout_reference(
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
    with contextlib.suppress(MetricError):  # absent, damaged, or of other features
        kept = load_reference(path, features, rows=True, spatial=spatial)
    # All processes decide alike, whichever of them saw the file first.
    if all(gather(kept is not None)) and kept is not None:
        return kept
    wanted = ("moments", "rows", "spatial") if spatial else ("moments", "rows")
    found = collect(features, own_images(dataset, split), wanted)
    if not world()[0]:
        save_reference(path, features, found, f"{dataset.name}-{split}")
    with main_first():
        return load_reference(path, features, rows=True, spatial=spatial)
