"""Pictures to a latent store, shard by shard: each one is whole or absent, so a kill loses one.

Shard k holds pictures k S .. (k+1) S - 1 of the source without those that cannot be read. It is
written first, then a small JSON beside it with its checksum and sums; the manifest comes last, from
the JSONs alone, by whichever process finds all of them. Processes share nothing but the folder.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor

from experiments.data.data_options import DataError, require
from experiments.data.encoders import Autoencoder, TextEncoder, sample_moments
from experiments.data.latents_spec import FORMAT, MANIFEST, Manifest, StoredShard, StoredText
from experiments.data.picture_sources import CroppedPicture, PictureSource, RawPicture, crop_ahead
from experiments.runtime.files import atomic_write
from routing.parsing import Malformed, json_of
from routing.rng import Draws

PLAN = "plan.json"
SKIPPED = "skipped.txt"


@dataclass(frozen=True)
class StoreSettings:
    """What makes two preparations of one source the same."""

    vae: str  # name or folder of the autoencoder
    size: int = 256  # side of the cropped pictures in pixels
    kind: str = "moments"  # `moments` (a training step samples from them anew) or one `sample`
    flips: bool = True  # store mirrored pictures' latents too
    dtype: str = "float16"  # `float16` or `float32` on disk
    shard: int = 4096  # pictures per shard
    text: str | None = None  # name or folder of the text encoder, or None
    captions: int = 1  # captions stored per picture
    text_length: int = 77  # tokens per caption


class StoreWriter:
    """Encodes the pictures of a source into a folder, which `threads` decode and crop.

    `progress` is called after each batch with `done`, the pictures that went through this writer.
    """

    def __init__(
        self,
        source: PictureSource,
        vae: Autoencoder,
        out: Path,
        settings: StoreSettings,
        text: TextEncoder | None = None,
        batch: int = 16,
        threads: int = 4,
    ) -> None:
        said = f"--size {settings.size} is no multiple of the VAE's factor {vae.factor}"
        fits = max(settings.size // vae.factor, 1) * vae.factor
        require(settings.size % vae.factor == 0, f"{said}; try --size {fits}")
        if text is not None and not source.captioned:
            raise DataError("--text needs a caption for every picture; give them with --captions")
        self.source, self.vae, self.out, self.settings = source, vae, out, settings
        self.text, self.batch, self.threads = text, batch, threads
        self.done = 0
        self.progress: Callable[[int], None] = lambda done: None
        self.shards = -(-source.count // settings.shard)
        self._plan()

    def _plan(self) -> None:
        """Write down what is made here, or refuse a folder where something else was begun."""
        plan = {"format": FORMAT, "source": self.source.fingerprint, "count": self.source.count}
        plan |= asdict(self.settings)
        path = self.out / PLAN
        try:
            old = json_of(path.read_bytes())
        except FileNotFoundError:
            atomic_write(path, json.dumps(plan, indent=1) + "\n")
            return
        except Malformed:
            raise DataError(f"{path} is damaged; give a new folder") from None
        # Older plans do not say how long their captions are.
        old = {"text_length": plan["text_length"]} | (old if isinstance(old, dict) else {})
        for key, value in plan.items():
            was = f"{key} {old.get(key)!r} instead of {value!r}"
            if key == "source":
                was = "another list of pictures, other captions or columns"
            again = "give the same again, or a new folder"
            require(old.get(key) == value, f"{self.out} was begun with {was}; {again}")

    def missing(self) -> list[int]:
        """Return the shards that are not finished."""
        return [k for k in range(self.shards) if self._finished(k) is None]

    def _paths(self, k: int) -> tuple[Path, Path]:
        return self.out / f"shard-{k:05d}.safetensors", self.out / f"shard-{k:05d}.json"

    def _finished(self, k: int) -> dict[str, Any] | None:
        shard, note = self._paths(k)
        try:
            about = json_of(note.read_bytes())
            size = shard.stat().st_size if about["count"] else 0
            return about if size == about["bytes"] else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, k: int) -> None:
        """Encode shard `k` and write it."""
        shard, note = self._paths(k)
        tensors, sums, skipped = self._encode(k)
        count = len(tensors["latents"]) if tensors else 0
        data = save(tensors) if count else b""
        about = {"count": count, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        about |= {"sums": sums, "skipped": skipped}
        if count:
            atomic_write(shard, data)
        atomic_write(note, json.dumps(about) + "\n")

    def _encode(self, k: int) -> tuple[dict[str, Tensor], dict[str, Any], list[list[str]]]:
        """Return the tensors of shard `k`, the sums for mean and std, and what was skipped."""
        start = k * self.settings.shard
        stop = min(start + self.settings.shard, self.source.count)
        parts: dict[str, list[Tensor]] = {}
        read: list[RawPicture] = []
        skipped: list[list[str]] = []
        sums = np.zeros((2, self.vae.channels))
        with ThreadPoolExecutor(self.threads) as pool:
            cropped = crop_ahead(pool, self.source.read(start, stop), self.settings.size)
            while chunk := list(itertools.islice(cropped, self.batch)):
                good = [item for item in chunk if item.pixels is not None]
                skipped += [[i.raw.name, i.reason] for i in chunk if i.pixels is None]
                if good:
                    self._encode_batch(good, parts, sums)
                    read += [item.raw for item in good]
                self.done += len(chunk)
                self.progress(self.done)
        tensors = {name: torch.cat(values).contiguous() for name, values in parts.items()}
        labels = [raw.label for raw in read if raw.label is not None]
        if tensors and self.source.labelled:
            tensors["labels"] = torch.tensor(labels, dtype=torch.int32)
        if tensors and self.text is not None:
            tensors |= self._caption_tensors(read)
        total = {
            "n": tensors["latents"][:, 0].numel() if tensors else 0,
            "sum": sums[0].tolist(),
            "square": sums[1].tolist(),
            "label": max(labels, default=-1),
        }
        return tensors, total, skipped

    def _encode_batch(
        self, items: list[CroppedPicture], parts: dict[str, list[Tensor]], sums: NDArray[Any]
    ) -> None:
        stacked = np.stack([item.pixels for item in items if item.pixels is not None])
        images = torch.from_numpy(stacked).permute(0, 3, 1, 2)
        moments = self.vae.encode(images).cpu()
        mean, log_variance = moments.double().chunk(2, 1)
        variance = log_variance.clamp(-30, 20).exp()
        sums[0] += mean.sum((0, 2, 3)).numpy()
        sums[1] += (mean.square() + variance).sum((0, 2, 3)).numpy()
        parts.setdefault("latents", []).append(self._stored(moments, items, "straight"))
        if self.settings.flips:
            flipped = self.vae.encode(images.flip(-1)).cpu()
            parts.setdefault("latents_flip", []).append(self._stored(flipped, items, "flip"))
        if self.text is not None:
            flat = [caption for item in items for caption in self._chosen(item.raw)]
            text = self.text(flat).half().cpu()
            parts.setdefault("text", []).append(text.unflatten(0, (len(items), -1)))

    def _stored(self, moments: Tensor, items: list[CroppedPicture], stream: str) -> Tensor:
        if self.settings.kind == "sample":
            # Keyed by the picture, so that a shard comes out the same whoever encodes it.
            names = [item.raw.name.encode("utf-8", "surrogateescape") for item in items]
            keys = [hashlib.sha256(name).digest()[:7] for name in names]
            index = torch.tensor([int.from_bytes(key, "little") for key in keys])
            moments = sample_moments(moments, Draws(0, 0, index), stream)
        stored = moments.to(getattr(torch, self.settings.dtype))
        finite = stored.isfinite().flatten(1).all(1).tolist()
        if not all(finite):
            raise DataError(
                f"{items[finite.index(False)].raw.name} has latents that are not finite in "
                f"{self.settings.dtype}; try --dtype float32, or another --vae"
            )
        return stored

    def _chosen(self, raw: RawPicture) -> list[str]:
        if not raw.captions:
            raise DataError(f"{raw.name} has no caption; --text needs one for every picture")
        chosen = itertools.islice(itertools.cycle(raw.captions), self.settings.captions)
        # A text that was cut off inside a pair of JSON's \u escapes ends in half a character.
        return [caption.encode("utf-8", "replace").decode() for caption in chosen]

    def _caption_tensors(self, pictures: list[RawPicture]) -> dict[str, Tensor]:
        """Return all captions as UTF-8 bytes, and where each ends."""
        flat = [caption.encode() for raw in pictures for caption in self._chosen(raw)]
        ends = torch.tensor([len(caption) for caption in flat]).cumsum(0).view(len(pictures), -1)
        data = np.frombuffer(b"".join(flat) or b" ", np.uint8).copy()
        return {"captions": torch.from_numpy(data), "caption_ends": ends}

    def finish(self) -> Manifest | None:
        """Write the manifest if every shard is there; return it, or None while some are missing."""
        notes = [self._finished(k) for k in range(self.shards)]
        done = [note for note in notes if note is not None]
        if len(done) < self.shards:
            return None
        skipped = [entry for note in done for entry in note["skipped"]]
        count = sum(note["count"] for note in done)
        if not count:
            (name, why), *_ = skipped
            raise DataError(
                f"none of {self.source.count} pictures could be read; the first, {name}: {why}; "
                "mend them and give a new folder: here they are not read again"
            )
        n = sum(note["sums"]["n"] for note in done)
        first = np.sum([note["sums"]["sum"] for note in done], 0) / n
        second = np.sum([note["sums"]["square"] for note in done], 0) / n
        side = self.settings.size // self.vae.factor
        highest = max(note["sums"]["label"] for note in done)
        text, of = self.text, (self.settings.captions,)
        manifest = Manifest(
            kind=self.settings.kind,
            shape=(self.vae.channels, side, side),
            count=count,
            flips=self.settings.flips,
            labels=self.source.labelled,
            # Without labels the highest is -1: no classes.
            classes=self.source.classes or tuple(str(k) for k in range(highest + 1)),
            text=None if text is None else StoredText(text.name, (*of, text.length, text.width)),
            vae=self.settings.vae,
            scale_factor=self.vae.scale_factor,
            shift_factor=self.vae.shift_factor,
            image_size=self.settings.size,
            mean=tuple(first.tolist()),
            std=tuple(np.sqrt(second - first**2).tolist()),
            source=self.source.fingerprint,
            skipped=len(skipped),
            shards=tuple(
                StoredShard(self._paths(k)[0].name, note["count"], note["bytes"], note["sha256"])
                for k, note in enumerate(done)
                if note["count"]
            ),
        )
        listed = "".join(f"{name}\t{reason}\n" for name, reason in skipped)
        atomic_write(self.out / SKIPPED, listed.encode("utf-8", "surrogateescape"))
        atomic_write(self.out / MANIFEST, manifest.dumps())
        return manifest
