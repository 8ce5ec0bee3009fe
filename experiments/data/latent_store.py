"""Latents on disk: prepared stores, WebDataset tars, and LightningDiT's safetensors shards.

A prepared store is shards of tensors beside a manifest that says what they hold:

    imagenet256/
      manifest.json             kind, shape, counts, classes, scale, mean and std, SHA-256 of shards
      shard-00000.safetensors   latents (n, C, H, W), or moments (n, 2 C, H, W); latents_flip;
      shard-00001.safetensors   labels (n,); text (n, K, L, E); captions

Rows are read from mapped files in any order, without worker processes. Nothing is unpickled, ever:
a pickle is refused with a sentence that says how to convert it.
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
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save
from torch import Tensor

from experiments.data.data_options import DataError, first_line, require
from experiments.data.latents_spec import Manifest, layout, moments_or_sample
from experiments.data.tars import latent_in, samples_of
from experiments.runtime.files import atomic_write, sha256, visible_files
from experiments.runtime.parsing import whole

Tensors = dict[str, Tensor]
_AGAIN = "copy it again, or rerun prepare without it"


class Store:
    """Latents in some layout on disk: files of tensors, row i of the whole is found in its file."""

    layout: str  # its name, for messages
    kind: str  # `moments` or `sample`
    shape: tuple[int, int, int]  # (C, H, W) of a latent
    count: int  # number of samples
    labels: Tensor | None = None  # (N,) int64, or None
    classes: tuple[str, ...] = ()  # names of classes; may be empty
    has_flips = False  # whether mirrored pictures' latents are stored
    scale_factor: float | None = None  # as in `Manifest`, or None where the layout names none
    shift_factor: float = 0.0  # as in `Manifest`
    scaled = False  # whether stored samples are already multiplied by it
    normalised = False  # whether the layout is meant to be normalised by `mean` and `std`
    mean: Tensor | None = None  # per channel, or None
    std: Tensor | None = None  # per channel, or None
    vae: str | None = None  # which autoencoder made it, or None
    text: tuple[int, int, int] | None = None  # (K, L, E), or None
    text_encoder: str | None = None  # which text encoder made `text`
    fingerprint: str  # changes with the contents

    def _open(
        self, files: list[tuple[Path, Tensors]], tails: dict[str, Any], counts: Sequence[int]
    ) -> None:
        """Keep the files; each holds its count of rows, which have the shapes `tails` by name."""
        self._files = [file for _, file in files]
        for (path, file), count in zip(files, counts, strict=True):
            for name, tail in tails.items():
                like = self._files[0].get(name.removesuffix("_flip"))
                good = name in file and like is not None and file[name].dtype == like.dtype
                if not good or tail is not None and file[name].shape != (count, *tail):
                    of = f" of {[count, *tail]}" if tail is not None else ""
                    kind = f" {like.dtype}" if like is not None else ""
                    holds = (f"{k} {t.dtype} {list(t.shape)}" for k, t in file.items())
                    raise DataError(
                        f"{path} holds {', '.join(holds) or 'nothing'}; expected {name}{kind}{of}"
                    )
        self.count, self.has_flips = sum(counts), "latents_flip" in tails
        self._ends = np.cumsum(counts)
        if "labels" in tails:
            self.labels = torch.cat([_whole_labels(path, file["labels"]) for path, file in files])

    def _find(self, index: Tensor) -> list[tuple[Tensors, int]]:
        """Return the file of each row (B,) of the whole, and its row in there."""
        files = np.searchsorted(self._ends, index.numpy(), side="right")
        rows = index.numpy() - np.concatenate(([0], self._ends))[files]
        return [(self._files[k], row) for k, row in zip(files, rows.tolist(), strict=True)]

    def latents(self, index: Tensor, flip: Tensor | None = None) -> Tensor:
        """Return stored rows (B, C or 2 C, H, W), of mirrored pictures where `flip` (B,)."""
        turned = [False] * len(index) if flip is None else flip.tolist()
        names = ["latents_flip" if one else "latents" for one in turned]
        found = zip(names, self._find(index), strict=True)
        return torch.stack([file[name][row] for name, (file, row) in found])

    def text_rows(self, index: Tensor, which: Tensor) -> tuple[Tensor, list[str]]:
        """Return caption embeddings (B, L, E) and the captions, caption `which` of each sample."""
        rows, captions = [], []
        for (file, row), one in zip(self._find(index), which.tolist(), strict=True):
            rows.append(file["text"][row, one])
            ends = file["caption_ends"].view(-1)
            at = row * file["text"].shape[1] + one
            start, end = int(ends[at - 1]) if at else 0, int(ends[at])
            content = file["captions"][start:end].numpy().tobytes()
            captions.append(content.decode("utf-8", "replace"))
        return torch.stack(rows).float(), captions

    def _fingerprint(self, said: list[Any]) -> str:
        """Return a checksum of names and sizes, labels, statistics, and rows from all over.

        Reading all of it would take hours; latents of another encoder differ in every row.
        """
        digest = hashlib.sha256(json.dumps(said).encode())
        rows = min(self.count, 64)
        spread = torch.arange(rows) * self.count // max(rows, 1)
        for part in (self.latents(spread), self.labels, self.mean, self.std):
            if part is not None:
                digest.update(part.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]


def _whole_labels(path: Path, labels: Tensor) -> Tensor:
    """Return a file's labels as int64; refuse fractions, which a conversion would truncate."""
    if labels.is_complex():
        raise DataError(f"{path} has labels of type {labels.dtype}; expected whole numbers")
    if labels.is_floating_point():
        fractions = labels[labels != labels.round()]  # NaN is among them, infinity is not
        wrong = fractions if len(fractions) else labels[labels.isinf()]
        value = f"{float(wrong[0]):g}" if len(wrong) else ""
        require(not len(wrong), f"{path} has label {value}; expected whole numbers from 0 on")
    return labels.long()


def open_store(path: str | os.PathLike[str], *, kind: str = "auto", verify: bool = False) -> Store:
    """Open a folder of latents in any layout; `verify` checks every SHA-256 of a prepared store."""
    folder = Path(path).expanduser()
    found = layout(folder)
    if found == "prepared":
        return LatentStore(folder, verify)
    return TarStore(folder, kind) if found == "tars" else LightningStore(folder, kind)


def _mapped(path: Path) -> Tensors:
    """Return a file's tensors, which read it as they are indexed; do not write to them.

    The mappings hold no file descriptors: a process has 1024, and ImageNet's shards may be more.
    """
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        there = f"truncated or no safetensors file ({error})"
        raise DataError(f"{path} is {there if path.exists() else 'missing'}; {_AGAIN}") from None


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
        tails: dict[str, Any] = {"latents": (channels, *self.shape[1:])}
        if manifest.flips:
            tails["latents_flip"] = tails["latents"]
        if manifest.labels:
            tails["labels"] = ()
        if manifest.text is not None:
            self.text, self.text_encoder = manifest.text.shape, manifest.text.encoder
            tails |= {"text": self.text, "caption_ends": self.text[:1], "captions": None}
        files = []
        for shard in manifest.shards:
            file = path / shard.file
            files.append((file, _mapped(file)))
            same = file.stat().st_size == shard.bytes
            same = same and (not verify or sha256(file) == shard.sha256)
            said = f"{file} has changed: its size or SHA-256 is not what manifest.json says"
            require(same, f"{said}; {_AGAIN}")
        self._open(files, tails, [shard.count for shard in manifest.shards])


# --- other projects' stores -----------------------------------------------------------------------


class TarStore(Store):
    """WebDataset tars with `latent.npy` and `cls`, as the TREAD release reads them.

    MaskDiT's 8-channel moments are read as well, in `latent.npy` or in a field `latent` with the
    same bytes. Positions of all samples are listed once, and kept in the folder if it is writable.
    """

    layout = "a set of WebDataset tars"

    def __init__(self, path: Path, kind: str = "auto") -> None:
        tars = visible_files(path, "*.tar")
        for tar in tars:
            require(tar.is_file(), f"{tar} is no file, or a link to none; copy it again")
        files = [[tar.name, tar.stat().st_size] for tar in tars]
        state = json.dumps([files, [tar.stat().st_mtime_ns for tar in tars]]).encode()
        kept, index = path / ".latent-index", b""
        with contextlib.suppress(OSError):
            # Behind its checksum: one that is damaged, or of other tars, is made again.
            found = kept.read_bytes()
            index = found[32:] if found[:32] == hashlib.sha256(state + found[32:]).digest() else b""
        if not index:
            index = save(_positions(tars))
            with contextlib.suppress(OSError):  # a read-only data set is normal
                atomic_write(kept, hashlib.sha256(state + index).digest() + index)
        self._index = load(index)
        self._tars = [_bytes(tar) for tar in tars]
        self.labels = self._index["labels"] if len(self._index["labels"]) else None
        self.count, stored = len(self._index["offset"]), tuple(self._index["like"].shape[1:])
        self.kind, self.shape = moments_or_sample(stored, kind, f"{tars[0]}: latent.npy")
        self.scaled = self.kind == "sample"
        self.fingerprint = self._fingerprint([files, list(stored)])

    def latents(self, index: Tensor, flip: Tensor | None = None) -> Tensor:
        """Return stored rows (B, C or 2 C, H, W)."""
        like = self._index["like"]
        size = like.itemsize * like.shape[1:].numel()
        at = torch.stack([self._index["tar"][index], self._index["offset"][index]], 1).tolist()
        rows = torch.stack([self._tars[tar][start : start + size] for tar, start in at])
        return rows.view(like.dtype).view(-1, *like.shape[1:])


def _positions(tars: Sequence[Path]) -> Tensors:
    """Return tar and offset (N,) of all latents, labels (N,) or none, and a (0, C, H, W) `like`."""
    tar, offset, labels = [], [], []
    first: Any = None
    for number, path in enumerate(tars):
        with path.open("rb") as archive:
            for key, fields in samples_of(path).items():
                where = f"{path}: {key}"
                dtype, shape, start = latent_in(archive, fields, where)
                first = first or (dtype, shape)
                held = f"{where} holds {dtype} {list(shape)}; the samples before it hold"
                require((dtype, shape) == first, f"{held} {first[0]} {list(first[1])}")
                tar.append(number)
                offset.append(start)
                if "cls" in fields:
                    archive.seek(fields["cls"].offset)
                    said = archive.read(min(fields["cls"].size, 32)).decode("latin-1")
                    labels.append(whole(said, f"{where}: cls holds ", DataError))
                alike = len(labels) in (0, len(offset))
                require(alike, f"{where}: either all samples have a cls, or none")
    return {
        "tar": torch.tensor(tar),
        "offset": torch.tensor(offset),
        "labels": torch.tensor(labels, dtype=torch.int64),
        "like": torch.from_numpy(np.empty((0, *first[1]), first[0])),
    }


def _bytes(path: Path) -> Tensor:
    """Return a file's bytes, read as they are touched; the mapping holds no file descriptor."""
    size = path.stat().st_size
    try:
        return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    except RuntimeError as error:
        raise DataError(f"{path} cannot be mapped: {first_line(error)}") from None


class LightningStore(Store):
    """LightningDiT's shards: `latents`, `latents_flip` and `labels`, beside `latents_stats.pt`.

    Its published rule normalises with the stored statistics, (latent - mean) / std.
    """

    layout = "LightningDiT's safetensors shards"

    def __init__(self, path: Path, kind: str = "auto") -> None:
        files = [(file, _mapped(file)) for file in visible_files(path, "*.safetensors")]
        shapes = [file["latents"].shape for _, file in files if "latents" in file]
        require(bool(shapes), f"{path} holds {len(files)} shards without latents")
        stored = tuple(shapes[0][1:])
        self.kind, self.shape = moments_or_sample(stored, kind, f"{path}: latents")
        rows = {"latents": stored, "latents_flip": stored, "labels": ()}
        tails = {name: tail for name, tail in rows.items() if name in files[0][1]}
        # What holds none is refused as a file of another shape.
        counts = [(*file.get("latents", torch.empty(0)).shape, 0)[0] for _, file in files]
        require(sum(counts) > 0, f"{path} holds {len(files)} shards without a sample")
        self._open(files, {"latents": stored} | tails, counts)
        statistics = path / "latents_stats.pt"
        if statistics.exists():
            self.mean, self.std = _read_statistics(statistics, self.shape[0])
            self.normalised = True
        self.fingerprint = self._fingerprint([[p.name, p.stat().st_size] for p, _ in files])


def _read_statistics(path: Path, channels: int) -> tuple[Tensor, Tensor]:
    try:
        values = torch.load(path, map_location="cpu", weights_only=True)
        mean, std = (values[key].float().flatten() for key in ("mean", "std"))
        good = len(mean) == len(std) == channels and bool((mean.isfinite() & (std > 0)).all())
        require(good and bool(std.isfinite().all()), "")
    except Exception:
        raise DataError(
            f"{path} is damaged: expected plain tensors (anything else is refused because it can "
            f"run code) mean and std of {channels} finite numbers each, std above 0; delete it and "
            "use data.scale=std to measure them"
        ) from None
    return mean, std
