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

import abc
import contextlib
import functools
import hashlib
import io
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from experiments.data import latents_spec
from experiments.data.data_options import DataError, first_line, require
from experiments.data.tars import Member, read_label, samples_of
from experiments.runtime.files import atomic_path, sha256

_AGAIN = "copy it again, or rerun prepare without it"


class Store(abc.ABC):
    """Latents in some layout on disk."""

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

    @abc.abstractmethod
    def latents(self, index: Tensor, flip: Tensor | None = None) -> Tensor:
        """Return stored rows (B, C or 2 C, H, W), of mirrored pictures where `flip` (B,)."""

    def text_rows(self, index: Tensor, which: Tensor) -> tuple[Tensor, list[str]]:
        """Return caption embeddings (B, L, E) and the captions, caption `which` of each sample."""
        raise DataError(f"{self.layout} holds no captions; task=text needs a captioned store")


Tensors = dict[str, Tensor]


def _mapped(path: Path) -> Tensors:
    """Return a file's tensors, which read it as they are indexed; do not write to them.

    The mappings hold no file descriptors: a process has 1024, and ImageNet's shards may be more.
    """
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        there = f"truncated or no safetensors file ({error})"
        raise DataError(f"{path} is {there if path.exists() else 'missing'}; {_AGAIN}") from None


def _check(path: Path, file: Tensors, name: str, shape: tuple[int, ...] | None = None) -> None:
    """Refuse a file whose tensor `name` is missing or not of `shape`."""
    if name not in file:
        holds = ", ".join(f"{key} {list(tensor.shape)}" for key, tensor in file.items())
        raise DataError(f"{path} has no {name}; it holds {holds or 'nothing'}")
    found = tuple(file[name].shape)
    if shape is not None and found != shape:
        raise DataError(f"{path}: {name} has shape {list(found)}; expected {list(shape)}")


class ShardStore(Store):
    """Rows spread over safetensors files: row i of the whole is found in its file."""

    def _open(
        self,
        files: list[tuple[Path, Tensors]],
        counts: Sequence[int],
        tails: dict[str, tuple[int, ...]],
    ) -> None:
        """Keep the files; each holds its count of rows, which have the shapes `tails` by name."""
        self._files = [file for _, file in files]
        self._ends = np.cumsum(counts)
        self._tables: dict[str, list[NDArray[np.uint8]]] = {name: [] for name in tails}
        for (path, file), count in zip(files, counts, strict=True):
            for name, tail in tails.items():
                _check(path, file, name, (count, *tail))
                found, wanted = file[name].dtype, self._files[0][name.removesuffix("_flip")].dtype
                require(found == wanted, f"{path}: {name} holds {found}; expected {wanted}")
                table = file[name].reshape(count, math.prod(tail)).view(torch.uint8)
                self._tables[name].append(table.numpy())
        self.count, self.has_flips = sum(counts), "latents_flip" in tails
        if "labels" in tails:
            self.labels = torch.cat([file["labels"] for file in self._files]).long()

    def _find(self, index: Tensor) -> tuple[list[int], list[int]]:
        """Return the file of each row (B,) of the whole, and its row in there."""
        rows = index.numpy()
        files = np.searchsorted(self._ends, rows, side="right")
        starts = np.concatenate(([0], self._ends))[files]
        return files.tolist(), (rows - starts).tolist()

    def _rows(self, name: str, index: Tensor, flip: Tensor | None = None) -> Tensor:
        """Return rows `index` (B,) of tensor `name`, of `name`_flip where `flip` (B,) is set."""
        first, names = self._files[0][name], [name] * len(index)
        if flip is not None:
            names = [f"{name}_flip" if turned else name for turned in flip.tolist()]
        out = np.empty((len(index), first.itemsize * math.prod(first.shape[1:])), np.uint8)
        # Copying row by row costs a microsecond each; torch's gathers per shard cost twenty.
        for at, (field, file, row) in enumerate(zip(names, *self._find(index), strict=True)):
            out[at] = self._tables[field][file][row]
        return torch.from_numpy(out).view(first.dtype).view(len(index), *first.shape[1:])

    def latents(self, index: Tensor, flip: Tensor | None = None) -> Tensor:
        """Return stored rows (B, C or 2 C, H, W), of mirrored pictures where `flip` (B,)."""
        return self._rows("latents", index, flip)


class LatentStore(ShardStore):
    """A store that `experiments/prepare.py` wrote; `verify` checks the SHA-256 of every shard."""

    layout = "a prepared store"

    def __init__(self, path: Path, verify: bool = False) -> None:
        manifest, self.fingerprint = latents_spec.Manifest.read(path)
        self.kind, self.shape, self.classes = manifest.kind, manifest.shape, manifest.classes
        self.scale_factor, self.shift_factor = manifest.scale_factor, manifest.shift_factor
        self.mean, self.std = torch.tensor(manifest.mean), torch.tensor(manifest.std)
        self.vae = manifest.vae
        channels = self.shape[0] * (2 if self.kind == "moments" else 1)
        tails: dict[str, tuple[int, ...]] = {"latents": (channels, *self.shape[1:])}
        if manifest.flips:
            tails["latents_flip"] = tails["latents"]
        if manifest.labels:
            tails["labels"] = ()
        if manifest.text is not None:
            self.text, self.text_encoder = manifest.text.shape, manifest.text.encoder
            tails |= {"text": self.text, "caption_ends": self.text[:1]}
        files = []
        for shard in manifest.shards:
            name = path / shard.file
            file, size = _mapped(name), name.stat().st_size
            require(
                size == shard.bytes,
                f"{name} has {size} bytes and the manifest says {shard.bytes}; {_AGAIN}",
            )
            require(
                not verify or sha256(name) == shard.sha256,
                f"{name} has changed since it was written (its SHA-256 is not the manifest's); "
                f"{_AGAIN}",
            )
            if manifest.text is not None:
                _check(name, file, "captions")
            files.append((name, file))
        self._open(files, [shard.count for shard in manifest.shards], tails)

    def text_rows(self, index: Tensor, which: Tensor) -> tuple[Tensor, list[str]]:
        """Return embeddings (B, L, E) and captions."""
        rows = self._rows("text", index)
        captions = []
        for number, row, one in zip(*self._find(index), which.tolist(), strict=True):
            file = self._files[number]
            ends = file["caption_ends"].view(-1)
            at = row * rows.shape[1] + one
            start, end = int(ends[at - 1]) if at else 0, int(ends[at])
            content = file["captions"][start:end].numpy().tobytes()
            captions.append(content.decode("utf-8", "replace"))
        return rows[torch.arange(len(index)), which].float(), captions


# --- other projects' stores -----------------------------------------------------------------------


_INDEX = ".latent-index.npz"
_STATISTICS = "latents_stats.pt"
_HEADER_LIMIT = 4096


def open_store(path: str | os.PathLike[str], *, kind: str = "auto", verify: bool = False) -> Store:
    """Open a folder of latents in any layout; `verify` checks every SHA-256 of a prepared store."""
    folder = Path(path).expanduser()
    found = latents_spec.layout(folder)
    if found == "prepared":
        return LatentStore(folder, verify)
    return TarStore(folder, kind) if found == "tars" else LightningStore(folder, kind)


def _fingerprint(store: Store, said: list[Any]) -> str:
    """Return a checksum of names and sizes, labels, statistics, and rows from all over a store.

    Reading all of it would take hours; latents of another encoder differ in every row.
    """
    digest = hashlib.sha256(json.dumps(said).encode())
    rows = min(store.count, 64)
    spread = torch.arange(rows) * store.count // max(rows, 1)
    for part in (store.latents(spread), store.labels, store.mean, store.std):
        if part is not None:
            digest.update(part.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


class TarStore(Store):
    """WebDataset tars with `latent.npy` and `cls`, as the TREAD release reads them.

    MaskDiT's 8-channel moments are read as well, in `latent.npy` or in a field `latent` with the
    same bytes. Positions of all samples are listed once, and kept in the folder if it is writable.
    """

    layout = "a set of WebDataset tars"

    def __init__(self, path: Path, kind: str = "auto") -> None:
        self.path = path
        self._tars = sorted(p for p in path.iterdir() if p.suffix == ".tar")
        for tar in self._tars:
            require(tar.is_file(), f"{tar} is no file, or a link to none; copy it again")
        self._files = [[tar.name, tar.stat().st_size] for tar in self._tars]
        times = [tar.stat().st_mtime_ns for tar in self._tars]
        self._state = json.dumps([self._files, times]).encode()
        index = self._load_index() or self._build_index()
        self._tar, self._offset = index["tar"], index["offset"]
        self.labels = torch.from_numpy(index["labels"]) if len(index["labels"]) else None
        self.count = len(self._offset)
        where = f"{self._tars[0]}: latent.npy"
        self._dtype, self._stored, self._header = _npy_header(bytes(index["header"]), where)
        self.kind, self.shape = latents_spec.moments_or_sample(self._stored, kind, where)
        self.scaled = self.kind == "sample"
        self._map = functools.cache(_map)
        self.fingerprint = _fingerprint(self, [self._files, list(self._stored)])

    def _load_index(self) -> dict[str, Any] | None:
        try:
            with (
                (self.path / _INDEX).open("rb") as file,
                np.load(file, allow_pickle=False) as stored,
            ):
                # It is written unpacked: one that would grow is not ours.
                size = sum(info.file_size for info in stored.zip.infolist())
                if size > os.fstat(file.fileno()).st_size:
                    return None
                index = {key: stored[key] for key in stored.files}
            tar, offset, labels = index["tar"], index["offset"], index["labels"]
            dtype, shape, header = _npy_header(bytes(index["header"]), "")
            # The last place in its tar where each sample could begin.
            last = np.array([size for _, size in self._files])[tar]
            last -= header + dtype.itemsize * math.prod(shape)
            good = (
                bytes(index["state"]) == self._state
                and (tar.dtype, offset.dtype, labels.dtype) == (np.int32, np.int64, np.int64)
                and tar.shape == offset.shape == (tar.size,)
                and labels.shape in ((0,), tar.shape)
                and tar.min() >= 0
                and ((offset >= 0) & (offset <= last)).all()
            )
            return index if good else None
        except Exception:
            return None

    def _build_index(self) -> dict[str, Any]:
        tar, offset, labels = [], [], []
        header = b""
        for number, path in enumerate(self._tars):
            with path.open("rb") as handle:
                for key, fields in samples_of(path).items():
                    where = f"{path}: {key}"
                    member = fields[latents_spec.latent_field(where, fields)]
                    found = _read_header(handle, member, f"{where}.{member.field}")
                    if header and found != header:
                        raise DataError(
                            f"{where} holds {_array(_npy_header(found, where))}; "
                            f"the samples before it hold {_array(_npy_header(header, where))}"
                        )
                    header = found
                    tar.append(number)
                    offset.append(member.offset)
                    if "cls" in fields:
                        handle.seek(fields["cls"].offset)
                        content = handle.read(min(fields["cls"].size, 32))
                        labels.append(read_label(content, where))
                    if len(labels) not in (0, len(offset)):
                        less, more = ("no cls", "one") if "cls" not in fields else ("a cls", "none")
                        raise DataError(f"{where} has {less}, and samples before it have {more}")
        index: dict[str, Any] = {
            "tar": np.array(tar, np.int32),
            "offset": np.array(offset, np.int64),
            "labels": np.array(labels, np.int64),
            "header": np.frombuffer(header, np.uint8),
            "state": np.frombuffer(self._state, np.uint8),
        }
        # A read-only data set is normal: the list is then made at every start.
        with contextlib.suppress(OSError), atomic_path(self.path / _INDEX) as temporary:
            np.savez(temporary, allow_pickle=False, **index)
        return index

    def latents(self, index: Tensor, flip: Tensor | None = None) -> Tensor:
        """Return stored rows (B, C or 2 C, H, W)."""
        size = self._dtype.itemsize * math.prod(self._stored)
        out = np.empty((len(index), size), np.uint8)
        for row, i in enumerate(index.tolist()):
            start = int(self._offset[i]) + self._header
            out[row] = self._map(self._tars[self._tar[i]])[start : start + size]
        return torch.from_numpy(out.view(self._dtype).reshape(-1, *self._stored))


def _map(path: Path) -> NDArray[Any]:
    """Return a file's bytes, read as they are touched; the mapping holds no file descriptor."""
    size = path.stat().st_size
    try:
        return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).numpy()
    except RuntimeError as error:
        raise DataError(f"{path} cannot be mapped: {first_line(error)}") from None


def _read_header(handle: io.BufferedReader, member: Member, where: str) -> bytes:
    """Return the header of an .npy array, all of which is there."""
    handle.seek(member.offset)
    start = handle.read(min(_HEADER_LIMIT, member.size))
    if start[:1] == b"\x80" or start[:2] == b"PK":
        raise DataError(
            f"{where} is a pickle, which is never read because it can run code; convert it once, "
            "if you trust it, with numpy.save(file, numpy.asarray(pickle.load(old))) as latent.npy"
        )
    if start[:6] != b"\x93NUMPY" or len(start) < 12:
        raise DataError(f"{where} is no .npy array (it starts with {start[:6]!r})")
    found = _npy_header(start, where)
    needed = found[2] + found[0].itemsize * math.prod(found[1])
    said = f"{_array(found)} needs {needed} bytes and {member.size} are there"
    require(member.size == needed, f"{where} is truncated: {said}")
    return start[: found[2]]


def _npy_header(header: bytes, where: str) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """Return type and shape of an .npy array that begins so, and the length of its header."""
    formats = np.lib.format
    stream = io.BytesIO(header)
    try:
        first = formats.read_magic(stream) == (1, 0)
        read = formats.read_array_header_1_0 if first else formats.read_array_header_2_0
        shape, fortran, dtype = read(stream, max_header_size=_HEADER_LIMIT)
    except Exception:
        raise DataError(f"{where} has a damaged .npy header") from None
    good = dtype.kind == "f" and dtype.itemsize in (2, 4, 8) and dtype.byteorder != ">"
    said = f"{where} holds {dtype} {list(shape)}"
    require(good and not fortran, f"{said}; expected float16 or float32, C order")
    return dtype, shape, stream.tell()


def _array(header: tuple[np.dtype[Any], tuple[int, ...], int]) -> str:
    return f"{header[0]} {list(header[1])}"


class LightningStore(ShardStore):
    """LightningDiT's shards: `latents`, `latents_flip` and `labels`, beside `latents_stats.pt`.

    Its published rule normalises with the stored statistics, (latent - mean) / std.
    """

    layout = "LightningDiT's safetensors shards"

    def __init__(self, path: Path, kind: str = "auto") -> None:
        names = sorted(p for p in path.iterdir() if p.suffix == ".safetensors")
        files = [(name, _mapped(name)) for name in names]
        for name, file in files:
            _check(name, file, "latents")
            shape = list(file["latents"].shape)
            require(len(shape) == 4, f"{name}: latents has shape {shape}; expected [N, C, H, W]")
        counts = [len(file["latents"]) for _, file in files]
        require(sum(counts) > 0, f"{path} holds {len(files)} shards without a sample")
        first = files[0][1]
        stored = tuple(first["latents"].shape[1:])
        self.kind, self.shape = latents_spec.moments_or_sample(stored, kind, f"{names[0]}: latents")
        tails = {"latents": stored, "latents_flip": stored, "labels": ()}
        self._open(files, counts, {name: tail for name, tail in tails.items() if name in first})
        if (path / _STATISTICS).exists():
            self.mean, self.std = _read_statistics(path / _STATISTICS, self.shape[0])
            self.normalised = True
        self.fingerprint = _fingerprint(self, [[p.name, p.stat().st_size] for p in names])


def _read_statistics(path: Path, channels: int) -> tuple[Tensor, Tensor]:
    try:
        values = torch.load(path, map_location="cpu", weights_only=True)
        mean, std = (values[key].float().flatten() for key in ("mean", "std"))
    except Exception:
        raise DataError(
            f"{path} holds no plain tensors mean and std (anything else is refused because it can "
            "run code); delete it and use data.scale=std to measure them"
        ) from None
    said = f"{path} has {len(mean)} means for {channels} channels of latents"
    require(len(mean) == len(std) == channels, said)
    good = bool((mean.isfinite() & std.isfinite() & (std > 0)).all())
    require(good, f"{path} is damaged: expected finite means, and deviations above 0")
    return mean, std
