"""Latents on disk: prepared stores, and safetensors shards as LightningDiT's.

A prepared store is shards of tensors beside a manifest that describes them:

    imagenet256/
      manifest.json             kind, shape, counts, classes, scale, mean and std, SHA-256 of shards
      shard-00000.safetensors   latents (n, C, H, W), or moments (n, 2 C, H, W); latents_flip;
      shard-00001.safetensors   labels (n,); text (n, K, L, E); captions

Rows are read from memory-mapped files in any order, without worker processes. Pickles are never
read: the error explains how to convert them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from backbones.parsing import check_file
from experiments.data.data_options import DataError, require
from experiments.data.latent_manifest import Manifest, moments_or_sample, store_layout
from experiments.runtime.files import sha256, visible_files

Tensors = dict[str, Tensor]
_ADVICE = "copy it again, or rerun prepare without it"


class Store:
    """Latents on disk as one sequence of rows, distributed over files of tensors."""

    layout: str  # name of the layout, for messages
    kind: str  # `moments` or `sample`
    shape: tuple[int, int, int]  # (C, H, W) of a latent
    count: int  # number of samples
    labels: Tensor | None = None  # (N,) int64, or None
    classes: tuple[str, ...] = ()  # names of classes; may be empty
    has_flips = False  # whether latents of mirrored images are stored
    scale_factor: float | None = None  # as in `Manifest`, or None if the layout names none
    shift_factor: float = 0.0  # as in `Manifest`
    scaled = False  # whether stored samples are already multiplied by the scale factor
    normalised = False  # whether the layout is normalised by `mean` and `std`
    mean: Tensor | None = None  # per channel, or None
    std: Tensor | None = None  # per channel, or None
    vae: str | None = None  # name of the autoencoder, or None
    text: tuple[int, int, int] | None = None  # (K, L, E), or None
    text_encoder: str | None = None  # name of the encoder of `text`
    fingerprint: str  # changes with the contents

    def _open(
        self,
        files: list[tuple[Path, Tensors]],
        row_shapes: dict[str, tuple[int, ...] | None],
        counts: Sequence[int],
    ) -> None:
        """Check and keep the files.

        Args:
            files: Paths and tensors.
            row_shapes: Shape of a row of each tensor; None for tensors without rows.
            counts: Number of rows of each file.
        """
        self._files = [tensors for _, tensors in files]
        self._mapped = [(path, path.stat()) for path, _ in files]
        for (path, tensors), count in zip(files, counts, strict=True):
            for name, row_shape in row_shapes.items():
                # Mirrored latents have the type of the others.
                reference = self._files[0].get(name.removesuffix("_flip"))
                shape = None if row_shape is None else (count, *row_shape)
                _check_tensor(path, tensors, name, shape, reference)
        self.count, self.has_flips = sum(counts), "latents_flip" in row_shapes
        self._ends = np.cumsum(counts)
        if "labels" in row_shapes:
            labels = [_integer_labels(path, tensors["labels"]) for path, tensors in files]
            self.labels = torch.cat(labels)

    def _rows_of(self, index: Tensor) -> list[tuple[Tensors, int]]:
        """Return the file of each row (B,), and its position in that file."""
        files = np.searchsorted(self._ends, index.numpy(), side="right")
        for number in np.unique(files):
            _check_size(*self._mapped[number])
        positions = index.numpy() - np.concatenate(([0], self._ends))[files]
        rows = []
        for file, position in zip(files, positions.tolist(), strict=True):
            rows.append((self._files[file], position))
        return rows

    def latents(self, index: Tensor, flip: Tensor | None = None) -> Tensor:
        """Return stored rows (B, C or 2 C, H, W), of mirrored images where `flip` (B,) is true."""
        mirrored = [False] * len(index) if flip is None else flip.tolist()
        latents = []
        for (tensors, position), use_flip in zip(self._rows_of(index), mirrored, strict=True):
            latents.append(tensors["latents_flip" if use_flip else "latents"][position])
        return torch.stack(latents)

    def text_rows(self, index: Tensor, caption_number: Tensor) -> tuple[Tensor, list[str]]:
        """Return caption embeddings (B, L, E) and captions; `caption_number` (B,) selects one."""
        embeddings, captions = [], []
        numbers = caption_number.tolist()
        for (tensors, position), number in zip(self._rows_of(index), numbers, strict=True):
            embeddings.append(tensors["text"][position, number])
            ends = tensors["caption_ends"].view(-1)
            caption = position * tensors["text"].shape[1] + number
            start, end = int(ends[caption - 1]) if caption else 0, int(ends[caption])
            content = tensors["captions"][start:end].numpy().tobytes()
            captions.append(content.decode("utf-8", "replace"))
        return torch.stack(embeddings).float(), captions

    def _fingerprint(self, description: list[Any]) -> str:
        """Return a checksum of a description, labels, statistics, and a sample of the rows.

        Reading all rows would take hours, and latents of another encoder differ in every row.
        """
        digest = hashlib.sha256(json.dumps(description).encode())
        for part in (self.latents(self._spread_rows()), self.labels, self.mean, self.std):
            if part is not None:
                digest.update(part.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    def check_finite(self, path: str) -> None:
        """Refuse latents that are not finite, among 64 rows that are spread over the store."""
        rows = self._spread_rows()
        bad = rows[~self.latents(rows).isfinite().flatten(1).all(1)]
        if len(bad):
            raise DataError(
                f"{len(bad)} of {len(rows)} samples read of {path} are not finite, the "
                f"first is number {int(bad[0])}; make the latents again"
            )

    def _spread_rows(self) -> Tensor:
        count = min(self.count, 64)
        return torch.arange(count) * self.count // max(count, 1)


def _check_size(path: Path, opened: os.stat_result) -> None:
    """Refuse a file that was cut since it was mapped: reading beyond its end kills the process."""
    with contextlib.suppress(FileNotFoundError):  # removed or replaced: the mapping is intact
        now = path.stat()
        require(
            now.st_ino != opened.st_ino or now.st_size >= opened.st_size,
            f"{path} was cut from {opened.st_size} to {now.st_size} bytes while it was in use; "
            "restore it, and run the same command again to resume",
        )


def _check_tensor(
    path: Path, tensors: Tensors, name: str, shape: tuple[int, ...] | None, reference: Tensor | None
) -> None:
    """Refuse a file without a tensor, or with one of another shape or type than `reference`."""
    if name in tensors and reference is not None:
        same_type = tensors[name].dtype == reference.dtype
        if same_type and (shape is None or tensors[name].shape == shape):
            return
    content = ", ".join(f"{key} {t.dtype} {list(t.shape)}" for key, t in tensors.items())
    dtype = f" {reference.dtype}" if reference is not None else ""
    size = f" of {list(shape)}" if shape is not None else ""
    raise DataError(f"{path} holds {content or 'nothing'}; expected {name}{dtype}{size}")


def _integer_labels(path: Path, labels: Tensor) -> Tensor:
    """Return a file's labels as int64."""
    require(
        not (labels.is_floating_point() or labels.is_complex()),
        f"{path} has labels of type {labels.dtype}; expected integers",
    )
    return labels.long()


def open_store(path: str | os.PathLike[str], *, kind: str = "auto", verify: bool = False) -> Store:
    """Open a folder of latents in any layout; `verify` checks every SHA-256 of a prepared store."""
    folder = Path(path).expanduser()
    layout = store_layout(folder)
    if layout == "prepared":
        return LatentStore(folder, verify)
    return LightningStore(folder, kind)


def _mapped(path: Path) -> Tensors:
    """Return a file's tensors, which are read as they are indexed; do not write to them.

    The mappings hold no file descriptors: a process has 1024, and ImageNet may have more shards.
    """
    try:
        check_file(path)
        return load_file(path)
    except (OSError, SafetensorError) as error:
        problem = f"truncated or no safetensors file ({error})" if path.exists() else "missing"
        raise DataError(f"{path} is {problem}; {_ADVICE}") from None


class LatentStore(Store):
    """A store that `experiments/prepare.py` wrote; `verify` checks the SHA-256 of every shard."""

    layout = "a prepared store"

    def __init__(self, path: Path, verify: bool = False) -> None:
        manifest, self.fingerprint = Manifest.read(path)
        self.kind, self.shape, self.classes = manifest.kind, manifest.shape, manifest.classes
        self.scale_factor, self.shift_factor = manifest.scale_factor, manifest.shift_factor
        self.mean, self.std = torch.tensor(manifest.mean), torch.tensor(manifest.std)
        self.vae = manifest.vae
        channels = self.shape[0] * (2 if self.kind == "moments" else 1)
        row_shapes: dict[str, tuple[int, ...] | None] = {"latents": (channels, *self.shape[1:])}
        if manifest.flips:
            row_shapes["latents_flip"] = row_shapes["latents"]
        if manifest.labels:
            row_shapes["labels"] = ()
        if manifest.text is not None:
            self.text, self.text_encoder = manifest.text.shape, manifest.text.encoder
            row_shapes |= {"text": self.text, "caption_ends": self.text[:1], "captions": None}
        files, counts = [], []
        for shard in manifest.shards:
            file = path / shard.file
            files.append((file, _mapped(file)))
            counts.append(shard.count)
            unchanged = file.stat().st_size == shard.bytes
            if unchanged and verify:
                unchanged = sha256(file) == shard.sha256
            require(
                unchanged,
                f"{file} has changed: its size or SHA-256 is not what manifest.json says; "
                f"{_ADVICE}",
            )
        self._open(files, row_shapes, counts)


# --- stores of other projects ---------------------------------------------------------------------


class LightningStore(Store):
    """LightningDiT's shards: `latents`, `latents_flip` and `labels`, beside `latents_stats.pt`.

    As published, latents are normalised with the stored statistics, (latent - mean) / std. Shards
    that prepare imported from another layout have no statistics, and say whether they are scaled.
    """

    layout = "a set of safetensors shards"

    def __init__(self, path: Path, kind: str = "auto") -> None:
        files, counts, sizes = [], [], []
        for shard in visible_files(path, "*.safetensors"):
            tensors = _mapped(shard)
            files.append((shard, tensors))
            sizes.append([shard.name, shard.stat().st_size])
            # A shard without latents, or with a scalar, is refused by `_open`.
            has_rows = "latents" in tensors and tensors["latents"].ndim > 0
            counts.append(len(tensors["latents"]) if has_rows else 0)
        first_file, first = files[0]
        with safe_open(first_file, "pt") as file:
            self.scaled = (file.metadata() or {}).get("scaled") == "yes"
        require("latents" in first, f"{first_file} holds no latents")
        row_shape = tuple(first["latents"].shape[1:])
        self.kind, self.shape = moments_or_sample(row_shape, kind, f"{first_file}: latents")
        require(sum(counts) > 0, f"{path} holds {len(files)} shards without a sample")
        row_shapes: dict[str, tuple[int, ...] | None] = {"latents": row_shape}
        if "latents_flip" in first:
            row_shapes["latents_flip"] = row_shape
        if "labels" in first:
            row_shapes["labels"] = ()
        self._open(files, row_shapes, counts)
        statistics = path / "latents_stats.pt"
        if statistics.exists():
            self.mean, self.std = _read_statistics(statistics, self.shape[0])
            self.normalised = True
        self.fingerprint = self._fingerprint(sizes)


def _read_statistics(path: Path, channels: int) -> tuple[Tensor, Tensor]:
    try:
        check_file(path)
        values = torch.load(path, map_location="cpu", weights_only=True)
        mean, std = values["mean"].float().flatten(), values["std"].float().flatten()
        finite = mean.isfinite() & std.isfinite() & (std > 0)
        require(len(mean) == len(std) == channels and bool(finite.all()), "other values")
    except Exception:
        raise DataError(
            f"{path} is damaged: expected plain tensors (anything else is refused because it can "
            f"run code) mean and std of {channels} finite numbers each, std above 0; delete it and "
            "use data.scale=std to measure them"
        ) from None
    return mean, std
