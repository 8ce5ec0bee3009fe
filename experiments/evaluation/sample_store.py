"""Samples on disk: numbered shards in a folder, and the .npz of ADM's evaluator.

    FOLDER/manifest.json     what the samples are (settings, number, seeds)
    FOLDER/shard-00000.npz   images (n, H, W, 3) uint8, seeds (n,), labels (n,)

A killed call loses at most one shard, and processes share the shards. Repeating the call makes the
missing ones, with any number of processes; other settings in the same folder are refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backbones.parsing import json_of
from experiments.config.removed_keys import former_defaults
from experiments.evaluation.generation import Progress, labels_from_seeds
from experiments.evaluation.pipeline import SamplingPipeline
from experiments.options.roles import ConfigError
from experiments.runtime.files import atomic_path, atomic_write
from experiments.runtime.nested import differing
from experiments.runtime.processes import gather, world
from routing.errors import require

FORMAT = "tread-suite-samples/1"
SHARD = 512
Text = Callable[[Tensor], Tensor]
#: Images `(n, H, W, 3)`, seeds `(n,)` and labels `(n,)`, -1 for none.
Shard = tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]


@dataclasses.dataclass(frozen=True)
class SampleStore:
    """A folder of samples, with the manifest and the shards."""

    folder: Path

    def path(self, number: int) -> Path:
        """Return the path of a shard."""
        return self.folder / f"shard-{number:05d}.npz"

    def claim(self, manifest: Mapping[str, Any], finished: bool = False) -> None:
        """Write the manifest, or compare it with the existing one.

        A folder without samples, left by a call that failed early, may be claimed again.

        Args:
            manifest: JSON-able, with at least `count` and `shard` (images per shard).
            finished: Whether the shards were used and removed already.
        """
        path = self.folder / "manifest.json"
        manifest = json.loads(json.dumps(manifest, default=str))
        if not finished and not any(self.folder.glob("shard-*.npz")):
            atomic_write(path, json.dumps(manifest, indent=1) + "\n")
            return
        existing = json_of(path.read_bytes(), str(path)) if path.exists() else {}
        if not isinstance(existing, dict):
            existing = {}
        changed = [key.removeprefix("settings.") for key in differing(existing, manifest)]
        # `experiments/sample.py` keeps its shards below the folder that it was given.
        folder = self.folder.parent if self.folder.name == "shards" else self.folder
        require(
            not changed,
            f"{folder}/ holds other samples (they differ in {', '.join(changed)}): add --out "
            f"FOLDER or delete {folder}/",
            ConfigError,
        )

    def write(self, number: int, pixels: Tensor, seeds: Tensor, labels: Tensor | None) -> None:
        """Write one shard of uint8 images `(n, 3, H, W)`; label -1 means none."""
        if labels is None:
            labels = torch.full_like(seeds, -1)
        images, seeds, labels = pixels.permute(0, 2, 3, 1).contiguous(), seeds.cpu(), labels.cpu()
        with atomic_path(self.path(number)) as temporary, temporary.open("wb") as handle:
            np.savez(handle, images=images.numpy(), seeds=seeds.numpy(), labels=labels.numpy())

    def read(self, number: int) -> Shard:
        """Return one shard."""
        path = self.path(number)
        try:
            # Opened here, since numpy does not close a file that it cannot read.
            with path.open("rb") as file, np.load(file, allow_pickle=False) as data:
                images, seeds, labels = data["images"], data["seeds"], data["labels"]
                valid = images.ndim == 4 and images.dtype == np.uint8
                for column in (seeds, labels):
                    valid = valid and column.shape == images.shape[:1] and column.dtype.kind in "iu"
        except Exception:
            # Zip, zlib and numpy's own parser raise a dozen types between them.
            valid = False
        require(
            valid,
            f"{path} is damaged; delete it and run the sampling command again to make it",
            ConfigError,
        )
        return images, seeds, labels

    def shards(self) -> Iterator[Shard]:
        """Yield all shards in order."""
        total = self._shard_count()
        present = len(list(self.folder.glob("shard-*.npz")))
        require(
            present >= total,
            f"{self.folder} has {present} of {total} shards; run the sampling command again to "
            "make the others",
            ConfigError,
        )
        for number in range(total):
            yield self.read(number)

    def write_npz(self, count: int, path: str | os.PathLike[str]) -> None:
        """Write all `count` images as the sample batch that ADM's evaluator reads."""
        write_npz(((images, labels) for images, _, labels in self.shards()), count, path)

    def remove(self) -> None:
        """Remove the folder, and its parent if that is empty then."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.folder.parent.rmdir()

    def _shard_count(self) -> int:
        """Return the number of shards that the manifest states."""
        try:
            manifest = json_of((self.folder / "manifest.json").read_bytes())
            total = manifest.get("shards", -(-manifest["count"] // manifest["shard"]))
            if type(total) is int and total >= 1:
                return total
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError):
            pass
        raise ConfigError(
            f"{self.folder} is not a folder of samples: no manifest.json states their number"
        )


def read_shards(folder: str | os.PathLike[str]) -> Iterator[Shard]:
    """Yield (images `(n, H, W, 3)`, seeds `(n,)`, labels `(n,)`, -1 for none) shard by shard.

    Raises:
        ConfigError: If the folder holds no samples or not yet all of them.
    """
    return SampleStore(Path(folder)).shards()


def generate_shards(
    folder: str | os.PathLike[str],
    pipeline: SamplingPipeline,
    seeds: Tensor,
    labels: Tensor | str | None = "from-seed",
    text: Text | None = None,
    *,
    to_pixels: Callable[[Tensor], Tensor],
    settings: Mapping[str, Any] | None = None,
    shard: int = SHARD,
    batch: int = 64,
    progress: Progress | None = None,
    finished: bool = False,
) -> list[Path]:
    """Generate one image per seed into a folder, resuming an earlier call; a collective call.

    Args:
        folder: The folder.
        pipeline: The model, and how it is sampled.
        seeds: One per image, int64 `(n,)`.
        labels: As for `generate`.
        text: Function from positions in `seeds`, `(b,)`, to text states `(b, L, E)`.
        to_pixels: From data space `(b, C, H, W)` to uint8 `(b, 3, h, w)`.
        settings: What else identifies the samples, JSON-able (weights, data, ...).
        shard: Images per file.
        batch: Images per batch.
        progress: Called with finished images and all images of this process.
        finished: Only compare the settings: the shards were used and removed already.

    Returns:
        All shards in order, those of other processes too.

    Raises:
        ConfigError: If the folder holds samples of other settings.
    """
    store = SampleStore(Path(folder))
    if isinstance(labels, str):
        labels = labels_from_seeds(seeds, getattr(pipeline.model, "num_classes", 0), labels)
    rank, processes = world()
    if rank == 0:
        sizes = {"count": len(seeds), "shard": shard, "batch": batch}
        conditions = _digest(seeds, labels, "none" if text is None else "text")
        store.claim(sizes | _manifest(pipeline, conditions, settings or {}), finished)
    gather(None)  # wait until the first process has accepted the folder
    pieces = torch.arange(len(seeds)).split(shard)
    numbers = range(rank, 0 if finished else len(pieces), processes)
    done, total = 0, sum(len(pieces[number]) for number in numbers)
    for number in numbers:
        rows, report = pieces[number], _shard_progress(progress, done, total)
        done += len(rows)
        if store.path(number).exists():
            report(len(rows), len(rows))
            continue
        shard_labels = None if labels is None else labels[rows]
        states = None if text is None else text(rows)
        images = pipeline.generate(seeds[rows], shard_labels, states, batch=batch, progress=report)
        pixels = [to_pixels(part).cpu() for part in images.split(batch)]
        store.write(number, torch.cat(pixels), seeds[rows], shard_labels)
    gather(None)  # wait for the shards of the others
    return [store.path(number) for number in range(len(pieces))]


def _shard_progress(progress: Progress | None, done: int, total: int) -> Progress:
    """Return the progress of one shard, reported as that of all: `done` of `total` precede it."""

    def report(images: int, _shard_size: int) -> None:
        if progress is not None:
            progress(done + images, total)

    return report


def _manifest(
    pipeline: SamplingPipeline, conditions: str, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what identifies the samples, besides their number."""
    guidance = dataclasses.asdict(pipeline.guidance.options)
    route = pipeline.guidance.route
    guidance["route"] = str(route) if route else None
    return {
        "format": FORMAT,
        "conditions": conditions,
        "objective": dataclasses.asdict(pipeline.objective.options),
        # Older shards have the keys that were removed since.
        "sampler": dataclasses.asdict(pipeline.sampler.options) | former_defaults("sampler"),
        "guidance": guidance,
        "settings": dict(settings),
    }


def _digest(seeds: Tensor, labels: Tensor | None, text: str) -> str:
    """Return the start of a SHA-256 of seeds and labels; captions are part of `settings`."""
    label_bytes = b"none" if labels is None else labels.cpu().numpy().tobytes()
    content = seeds.cpu().numpy().tobytes() + label_bytes + text.encode()
    return hashlib.sha256(content).hexdigest()[:16]


def write_npz(
    pieces: Iterable[tuple[NDArray[np.uint8], NDArray[np.int64]]],
    count: int,
    path: str | os.PathLike[str],
) -> None:
    """Write the sample batch that ADM's evaluator reads: `arr_0` images, `arr_1` labels if any.

    Images are streamed: 50,000 of 256x256 are 9.8 GB, more than many machines hold.

    Args:
        pieces: (images uint8 `(n, H, W, 3)`, labels `(n,)`) in order; labels -1 mean none.
        count: Number of images in all.
        path: The `.npz` file.

    Raises:
        ValueError: If the pieces do not add up to `count`.
    """
    labels, written = [], 0
    with (
        atomic_path(path) as temporary,
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED, allowZip64=True) as archive,
    ):
        with archive.open("arr_0.npy", "w", force_zip64=True) as handle:
            for images, piece_labels in pieces:
                if not written:
                    shape = (count, *images.shape[1:])
                    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(handle, header)
                handle.write(np.ascontiguousarray(images).tobytes())
                written += len(images)
                labels.append(np.asarray(piece_labels))
        if written != count:
            raise ValueError(f"{written} images were given for a file of {count}")
        classes = np.concatenate(labels).astype(np.int64)
        if (classes >= 0).all():
            with archive.open("arr_1.npy", "w") as handle:
                np.lib.format.write_array(handle, classes, allow_pickle=False)
