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
from safetensors import SafetensorError, safe_open
from torch import Tensor

from experiments.data import latents_spec
from experiments.data.data_options import DataError, first_line
from experiments.data.tars import Member, read_label, samples_of
from experiments.runtime.files import atomic_path, sha256


class Store:
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

    _shards: Shards  # of a layout in shards

    def latents(self, index: Tensor, flip: Tensor | None = None) -> Tensor:
        """Return stored rows (B, C or 2 C, H, W), of mirrored pictures where `flip` (B,)."""
        return self._shards.rows("latents", index, flip)

    def text_rows(self, index: Tensor, which: Tensor) -> tuple[Tensor, list[str]]:
        """Return caption embeddings (B, L, E) and the captions, caption `which` of each sample."""
        raise DataError(f"{self.layout} holds no captions; task=text needs a captioned store")


class TensorFile:
    """A safetensors file whose tensors read the file as they are indexed; do not write to them.

    The mappings hold no file descriptors: a process has 1024, and ImageNet's shards may be more.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = safe_open(path, "pt")
            names = self._file.keys()
            self._shapes = {name: tuple(self._file.get_slice(name).get_shape()) for name in names}
        except (OSError, SafetensorError) as error:
            raise DataError(
                f"{path} is truncated or no safetensors file ({error}); copy it again, or delete "
                "it and rerun prepare"
            ) from None
        self._tensor = functools.cache(self._file.get_tensor)

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without mapping it; refuse a file that has none of this name."""
        if name not in self:
            holds = ", ".join(f"{key} {list(size)}" for key, size in self._shapes.items())
            raise DataError(f"{self.path} has no {name}; it holds {holds or 'nothing'}")
        return self._shapes[name]

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor that is mapped into memory."""
        return self._tensor(name)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a file whose tensor `name` is missing or not of `shape`."""
        found = self.shape(name)
        if found != shape:
            raise DataError(f"{self.path}: {name} has shape {list(found)}; expected {list(shape)}")


class Shards:
    """Rows spread over files, `counts` in each: finds row i of the whole in its file."""

    def __init__(self, files: Sequence[TensorFile], counts: Sequence[int]) -> None:
        self.files = list(files)
        self._ends = np.cumsum(counts)
        self._tables: dict[tuple[str, int], np.ndarray[Any, Any]] = {}

    def find(self, index: Tensor) -> tuple[list[int], list[int]]:
        """Return the shard of each row (B,) of the whole, and its row in there."""
        rows = index.numpy()
        shards = np.searchsorted(self._ends, rows, side="right")
        starts = np.concatenate(([0], self._ends))[shards]
        return shards.tolist(), (rows - starts).tolist()

    def rows(self, name: str, index: Tensor, flip: Tensor | None = None) -> Tensor:
        """Return rows `index` (B,) of tensor `name`, of `name`_flip where `flip` (B,) is set."""
        dtype, tail = self.files[0][name].dtype, self.files[0].shape(name)[1:]
        names = [name] * len(index)
        if flip is not None:
            names = [f"{name}_flip" if turned else name for turned in flip.tolist()]
        out = np.empty((len(index), dtype.itemsize * math.prod(tail)), np.uint8)
        # Copying row by row costs a microsecond each; torch's gathers per shard cost twenty.
        for at, (field, shard, row) in enumerate(zip(names, *self.find(index), strict=True)):
            out[at] = self._table(field, shard)[row]
        return torch.from_numpy(out).view(dtype).view(len(index), *tail)

    def _table(self, name: str, shard: int) -> np.ndarray[Any, Any]:
        key = (name, shard)
        if key not in self._tables:
            data = self.files[shard][name]
            self._tables[key] = data.reshape(len(data), -1).view(torch.uint8).numpy()
        return self._tables[key]

    def all(self, name: str) -> Tensor:
        """Return a small tensor of every shard in memory."""
        return torch.cat([file[name] for file in self.files])


class LatentStore(Store):
    """A store that `experiments/prepare.py` wrote; `verify` checks the SHA-256 of every shard."""

    layout = "a prepared store"

    def __init__(self, path: Path, verify: bool = False) -> None:
        self.path = path
        self.manifest, self.fingerprint = latents_spec.Manifest.read(path)
        manifest = self.manifest
        self.kind, self.shape, self.count = manifest.kind, manifest.shape, manifest.count
        self.has_flips, self.classes = manifest.flips, manifest.classes
        self.scale_factor, self.shift_factor = manifest.scale_factor, manifest.shift_factor
        self.mean, self.std = torch.tensor(manifest.mean), torch.tensor(manifest.std)
        self.vae = manifest.vae
        if manifest.text is not None:
            self.text, self.text_encoder = manifest.text.shape, manifest.text.encoder
        files = [self._open(shard, verify) for shard in manifest.shards]
        self._shards = Shards(files, [shard.count for shard in manifest.shards])
        if manifest.labels:
            self.labels = self._shards.all("labels").long()

    def _open(self, shard: latents_spec.StoredShard, verify: bool) -> TensorFile:
        path = self.path / shard.file
        if not path.exists():
            raise DataError(f"{path} is missing; copy it again, or rerun prepare to make it again")
        file = TensorFile(path)
        if path.stat().st_size != shard.bytes:
            raise DataError(
                f"{path} has {path.stat().st_size} bytes and the manifest says {shard.bytes}; "
                "copy it again, or delete it and rerun prepare"
            )
        channels = self.shape[0] * (2 if self.kind == "moments" else 1)
        expected: dict[str, tuple[int, ...]] = {"latents": (channels, *self.shape[1:])}
        if self.has_flips:
            expected["latents_flip"] = expected["latents"]
        if self.manifest.labels:
            expected["labels"] = ()
        if self.text is not None:
            expected["text"] = self.text
            expected["caption_ends"] = (self.text[0],)
        for name, tail in expected.items():
            file.check(name, (shard.count, *tail))
        if self.text is not None:
            file.shape("captions")
        if verify and sha256(path) != shard.sha256:
            raise DataError(
                f"{path} has changed since it was written (its SHA-256 is not the manifest's); "
                "copy it again, or delete it and rerun prepare"
            )
        return file

    def text_rows(self, index: Tensor, which: Tensor) -> tuple[Tensor, list[str]]:
        """Return embeddings (B, L, E) and captions."""
        rows = self._shards.rows("text", index)
        chosen = rows[torch.arange(len(index)), which].float()
        places = zip(*self._shards.find(index), which.tolist(), strict=True)
        return chosen, [self._caption(*place) for place in places]

    def _caption(self, shard: int, row: int, which: int) -> str:
        file = self._shards.files[shard]
        ends = file["caption_ends"]
        at = row * ends.shape[1] + which
        start, end = (int(ends.view(-1)[at - 1]) if at else 0), int(ends.view(-1)[at])
        return file["captions"][start:end].numpy().tobytes().decode("utf-8", "replace")


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
            return index if bytes(index["state"]) == self._state and self._holds(index) else None
        except Exception:
            return None

    def _holds(self, index: dict[str, Any]) -> bool:
        """Whether every sample of a list lies inside of its tar."""
        tar, offset, labels = index["tar"], index["offset"], index["labels"]
        kinds = (tar.dtype, offset.dtype, labels.dtype) == (np.int32, np.int64, np.int64)
        if not kinds or not len(tar) or tar.shape != offset.shape or tar.ndim != 1:
            return False
        if labels.shape not in ((0,), tar.shape) or tar.min() < 0 or tar.max() >= len(self._tars):
            return False
        dtype, shape, header = _npy_header(bytes(index["header"]), "")
        ends = np.array([size for _, size in self._files])[tar]
        item = header + dtype.itemsize * math.prod(shape)
        return bool((offset >= 0).all() and (offset + item <= ends).all())

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
    if member.size != needed:
        raise DataError(
            f"{where} is truncated: {_array(found)} needs {needed} bytes and {member.size} are "
            "there"
        )
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
    if dtype.kind != "f" or dtype.itemsize not in (2, 4, 8) or dtype.byteorder == ">" or fortran:
        raise DataError(
            f"{where} holds {dtype} {list(shape)}; expected float16 or float32, C order"
        )
    return dtype, shape, stream.tell()


def _array(header: tuple[np.dtype[Any], tuple[int, ...], int]) -> str:
    return f"{header[0]} {list(header[1])}"


class LightningStore(Store):
    """LightningDiT's shards: `latents`, `latents_flip` and `labels`, beside `latents_stats.pt`.

    Its published rule normalises with the stored statistics, (latent - mean) / std.
    """

    layout = "LightningDiT's safetensors shards"

    def __init__(self, path: Path, kind: str = "auto") -> None:
        names = sorted(p for p in path.iterdir() if p.suffix == ".safetensors")
        files = [TensorFile(name) for name in names]
        counts = []
        for file in files:
            rows = file.shape("latents")
            if len(rows) != 4:
                raise DataError(
                    f"{file.path}: latents has shape {list(rows)}; expected [N, C, H, W]"
                )
            file.check("latents", (rows[0], *files[0].shape("latents")[1:]))
            for name, shape in (("latents_flip", rows), ("labels", rows[:1])):
                if name in files[0] or name in file:
                    file.check(name, shape)
            counts.append(rows[0])
        self.count = sum(counts)
        if not self.count:
            raise DataError(f"{path} holds {len(files)} shards without a sample")
        stored = files[0].shape("latents")[1:]
        self.kind, self.shape = latents_spec.moments_or_sample(stored, kind, f"{names[0]}: latents")
        self.has_flips = "latents_flip" in files[0]
        self._shards = Shards(files, counts)
        if "labels" in files[0]:
            self.labels = self._shards.all("labels").long()
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
    if len(mean) != channels or len(std) != channels:
        raise DataError(f"{path} has {len(mean)} means for {channels} channels of latents")
    if not bool((mean.isfinite() & std.isfinite() & (std > 0)).all()):
        raise DataError(f"{path} is damaged: expected finite means, and deviations above 0")
    return mean, std
