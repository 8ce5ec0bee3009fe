"""A latent store: shards of tensors beside a manifest that says what they hold.

    imagenet256/
      manifest.json                 kind, shape, counts, classes, scale, mean and std, SHA-256 of
      shards
      shard-00000.safetensors       latents (n, C, H, W), or moments (n, 2 C, H, W); latents_flip;
      labels;
      shard-00001.safetensors       text (n, K, L, E); captions

Rows are read from mapped files in any order, without worker processes.
"""

from __future__ import annotations

import abc
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.data.data_options import DataError
from experiments.data.tensorfile import TensorFile
from routing.plain import json_of

FORMAT = "tread-latents/1"
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """What a store holds.

    Args:
        kind: `moments` (mean and log variance, 2 C channels) or `sample` (C channels).
        shape: (C, H, W) of a latent.
        count: Number of samples.
        flips: Whether `latents_flip` are stored.
        labels: Whether `labels` are stored.
        classes: Names of classes.
        text: None, or the encoder and its (K captions per sample, L tokens, E channels).
        vae: Which autoencoder made it.
        scale_factor: Multiplies `latent - shift_factor` to about unit standard deviation.
        shift_factor: Subtracted first; 0 for Stable Diffusion's VAE.
        image_size: Side of the pictures in pixels.
        mean: Mean of latents per channel, before scaling.
        std: Standard deviation of latents per channel, before scaling.
        source: Where the pictures came from.
        skipped: How many could not be read.
        shards: One of {file, count, bytes, sha256} each.
    """

    kind: str
    shape: tuple[int, int, int]
    count: int
    flips: bool
    labels: bool
    classes: tuple[str, ...]
    text: dict[str, Any] | None
    vae: str
    scale_factor: float
    shift_factor: float
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    source: str
    skipped: int
    shards: tuple[dict[str, Any], ...]

    def dumps(self) -> str:
        """Return the manifest as JSON."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def loads(cls, text: str, path: Path) -> Manifest:
        """Parse and check a manifest.

        Args:
            text: JSON.
            path: Named in errors.

        Raises:
            DataError: Not a manifest of this format, or one that contradicts itself.
        """
        try:
            values = json_of(text)
            found = values.pop("format", None)
            if found != FORMAT:
                raise DataError(f"{path} has format {found!r}; this version reads {FORMAT!r}")
            for key in ("shape", "classes", "mean", "std", "shards"):
                values[key] = tuple(values[key])
            manifest = cls(**values)
            channels, height, width = manifest.shape
            good = (
                manifest.kind in ("moments", "sample")
                and all(type(v) is int and v > 0 for v in (channels, height, width))
                and len(manifest.mean) == len(manifest.std) == channels
                and sum(shard["count"] for shard in manifest.shards) == manifest.count
                and all(Path(shard["file"]).name == shard["file"] for shard in manifest.shards)
                and all(type(shard["bytes"]) is int for shard in manifest.shards)
                and all(0 < float(v) < float("inf") for v in (*manifest.std, manifest.scale_factor))
                and all(math.isfinite(v) for v in (*manifest.mean, manifest.shift_factor))
                and all(type(v) in (int, float) for v in (*manifest.std, manifest.scale_factor))
                and all(type(v) is bool for v in (manifest.flips, manifest.labels))
                and all(type(v) is str for v in (manifest.vae, *manifest.classes))
                and all(type(shard["sha256"]) is str for shard in manifest.shards)
                and all(type(shard["count"]) is int for shard in manifest.shards)
                and (manifest.text is None or _is_text(manifest.text))
            )
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            if isinstance(error, DataError):
                raise
            good = False
        if not good:
            raise DataError(f"{path} is damaged; run prepare again, which keeps finished shards")
        return manifest


def _is_text(text: dict[str, Any]) -> bool:
    shape = tuple(text["shape"])
    sides = len(shape) == 3 and all(type(side) is int and side > 0 for side in shape)
    return sides and type(text["encoder"]) is str


class Store(abc.ABC):
    """Latents in some layout on disk.

    Attributes:
        layout: Its name, for messages.
        kind: `moments` or `sample`.
        shape: (C, H, W) of a latent.
        count: Number of samples.
        labels: (N,) int64, or None.
        classes: Names of classes; may be empty.
        has_flips: Whether mirrored pictures' latents are stored.
        scale_factor: As in `Manifest`, or None where the layout names none.
        shift_factor: As in `Manifest`.
        scaled: Whether stored samples are already multiplied by it.
        normalised: Whether the layout is meant to be normalised by `mean` and `std`.
        mean: Per channel, or None.
        std: Per channel, or None.
        vae: Which autoencoder made it, or None.
        text: None or (K, L, E).
        text_encoder: Which text encoder made `text`.
        fingerprint: Changes with the contents.
    """

    layout: str
    kind: str
    shape: tuple[int, int, int]
    count: int
    labels: Tensor | None = None
    classes: tuple[str, ...] = ()
    has_flips = False
    scale_factor: float | None = None
    shift_factor: float = 0.0
    scaled = False
    normalised = False
    mean: Tensor | None = None
    std: Tensor | None = None
    vae: str | None = None
    text: tuple[int, int, int] | None = None
    text_encoder: str | None = None
    fingerprint: str

    @abc.abstractmethod
    def latents(self, index: Tensor, flip: Tensor | None = None) -> Tensor:
        """Return stored rows (B, C or 2 C, H, W) in the stored type.

        Args:
            index: (B,) int64 on the CPU.
            flip: (B,) bool: take the mirrored picture's latent, where `has_flips`.
        """

    def text_rows(self, index: Tensor, which: Tensor) -> tuple[Tensor, list[str]]:
        """Return caption embeddings (B, L, E) and the captions, caption `which` of each sample."""
        raise DataError(f"{self.layout} holds no captions; task=text needs a captioned store")


class Shards:
    """Rows spread over files: finds row i of the whole in its file.

    Args:
        files: One file for each shard.
        counts: Rows in each.
    """

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
        first = self.files[0]
        dtype, tail = first.dtype(name), first.shape(name)[1:]
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
            count = data.shape[0]
            self._tables[key] = data.reshape(count, -1).view(torch.uint8).numpy()
        return self._tables[key]

    def all(self, name: str) -> Tensor:
        """Return a small tensor of every shard in memory."""
        return torch.cat([file[name] for file in self.files])


class LatentStore(Store):
    """A store that `experiments/prepare.py` wrote.

    Args:
        path: Its folder.
        verify: Check the SHA-256 of every shard.

    Raises:
        DataError: A missing, truncated, changed or contradictory file, named in one sentence.
    """

    layout = "a prepared store"

    def __init__(self, path: Path, verify: bool = False) -> None:
        self.path = path
        text = _read_text(path / MANIFEST)
        manifest = Manifest.loads(text, path / MANIFEST)
        self.manifest = manifest
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]
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
            check_rows(file, name, (shard["count"], *tail))
        if self.text is not None and "captions" not in file:
            check_rows(file, "captions", ())
        if verify:
            from experiments.runtime.files import sha256

            if sha256(path) != shard["sha256"]:
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
        if self.text is None:
            return super().text_rows(index, which)
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


def check_rows(file: TensorFile, name: str, shape: tuple[int, ...]) -> None:
    """Refuse a shard whose tensor `name` is missing or not of `shape`.

    Raises:
        DataError: Naming the file, what was found, and what was expected.
    """
    if name not in file:
        holds = ", ".join(f"{key} {list(file.shape(key))}" for key in file) or "nothing"
        raise DataError(f"{file.path} has no {name}; it holds {holds}")
    if file.shape(name) != shape:
        raise DataError(
            f"{file.path}: {name} has shape {list(file.shape(name))}; expected {list(shape)}"
        )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(
            f"{path} is damaged; run prepare again, which keeps finished shards"
        ) from None
