"""A latent store: shards of tensors beside a manifest that says what they hold.

    imagenet256/
      manifest.json             kind, shape, counts, classes, scale, mean and std, SHA-256 of shards
      shard-00000.safetensors   latents (n, C, H, W), or moments (n, 2 C, H, W); latents_flip;
      shard-00001.safetensors   labels (n,); text (n, K, L, E); captions

Rows are read from mapped files in any order, without worker processes.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from experiments.data.data_options import DataError
from experiments.data.latents_spec import Manifest
from experiments.runtime.files import sha256


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


class TensorFile:
    """A safetensors file whose tensors read the file as they are indexed; do not write to them.

    The mappings hold no file descriptor, of which a process has 1024 and ImageNet's shards may be
    more.
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
        self._tensors: dict[str, Tensor] = {}

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
        if name not in self._tensors:
            self._tensors[name] = self._file.get_tensor(name)
        return self._tensors[name]

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
        self.manifest, self.fingerprint = Manifest.read(path)
        manifest = self.manifest
        self.kind, self.shape, self.count = manifest.kind, manifest.shape, manifest.count
        self.has_flips, self.classes = manifest.flips, manifest.classes
        self.scale_factor, self.shift_factor = manifest.scale_factor, manifest.shift_factor
        self.mean, self.std = torch.tensor(manifest.mean), torch.tensor(manifest.std)
        self.vae = manifest.vae
        if manifest.text is not None:
            self.text = tuple(manifest.text["shape"])  # type: ignore[assignment]
            self.text_encoder = str(manifest.text["encoder"])
        files = [self._open(shard, verify) for shard in manifest.shards]
        self._shards = Shards(files, [shard["count"] for shard in manifest.shards])
        if manifest.labels:
            self.labels = self._shards.all("labels").long()

    def _open(self, shard: dict[str, Any], verify: bool) -> TensorFile:
        path = self.path / shard["file"]
        if not path.exists():
            raise DataError(f"{path} is missing; copy it again, or rerun prepare to make it again")
        file = TensorFile(path)
        if path.stat().st_size != shard["bytes"]:
            raise DataError(
                f"{path} has {path.stat().st_size} bytes and the manifest says {shard['bytes']}; "
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
            file.check(name, (shard["count"], *tail))
        if self.text is not None:
            file.shape("captions")
        if verify and sha256(path) != shard["sha256"]:
            raise DataError(
                f"{path} has changed since it was written (its SHA-256 is not the manifest's); "
                "copy it again, or delete it and rerun prepare"
            )
        return file

    def latents(self, index: Tensor, flip: Tensor | None = None) -> Tensor:
        """Return stored rows, mirrored pictures' where `flip`."""
        return self._shards.rows("latents", index, flip)

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
