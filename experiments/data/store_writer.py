"""Pictures to a latent store, shard by shard: each one is whole or absent, so a kill loses one.

Shard k holds pictures k S .. (k+1) S - 1 of the source without those that cannot be read. It is
written first, then a small JSON beside it with its checksum and sums; the manifest comes last, from
the JSONs alone, by whichever process finds all of them. Processes share nothing but the folder.
"""

from __future__ import annotations

import errno
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
from torch import Tensor

from experiments.data.autoencoder import Autoencoder
from experiments.data.data_options import DataError
from experiments.data.latent_store import FORMAT, MANIFEST, Manifest
from experiments.data.picture_files import Loaded, ahead, load
from experiments.data.picture_sources import Source
from experiments.data.text_encoder import TextEncoder
from experiments.runtime.files import atomic_write
from routing.plain import Malformed, json_of

PLAN = "plan.json"
SKIPPED = "skipped.txt"


@dataclass(frozen=True)
class Settings:
    """What makes two preparations of one source the same.

    Args:
        vae: Name or folder of the autoencoder.
        size: Side of the cropped pictures in pixels.
        kind: `moments` (a training step samples from them anew) or one `sample`.
        flips: Store mirrored pictures' latents too.
        dtype: `float16` or `float32` on disk.
        shard: Pictures per shard.
        text: Name or folder of the text encoder, or None.
        captions: Captions stored per picture.
    """

    vae: str
    size: int = 256
    kind: str = "moments"
    flips: bool = True
    dtype: str = "float16"
    shard: int = 4096
    text: str | None = None
    captions: int = 1


class Writer:
    """Encodes the pictures of a source into a folder.

    Args:
        source: The pictures.
        vae: The autoencoder.
        out: The folder.
        settings: How.
        text: The text encoder, where `settings.text`.
        batch: Pictures encoded at a time.
        threads: Threads that decode and crop pictures.
        progress: Called with the number of pictures after each batch.

    Raises:
        DataError: The folder holds another preparation, or the source lacks what is asked for.
    """

    def __init__(
        self,
        source: Source,
        vae: Autoencoder,
        out: Path,
        settings: Settings,
        *,
        text: TextEncoder | None = None,
        batch: int = 16,
        threads: int = 4,
        progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        if settings.size % vae.factor:
            raise DataError(
                f"--size {settings.size} is no multiple of the VAE's factor {vae.factor}; "
                f"try --size {max(settings.size // vae.factor, 1) * vae.factor}"
            )
        if text is not None and not source.captioned:
            raise DataError("--text needs a caption for every picture; give them with --captions")
        self.source, self.vae, self.out, self.settings = source, vae, out, settings
        self.text, self.batch, self.threads, self.progress = text, batch, threads, progress
        self.shards = -(-source.count // settings.shard)
        self._plan()

    def _plan(self) -> None:
        plan = {
            "format": FORMAT,
            "source": self.source.fingerprint,
            "count": self.source.count,
            **asdict(self.settings),
        }
        path = self.out / PLAN
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            if path.exists():
                old = json_of(path.read_bytes())
                self._compare(old if isinstance(old, dict) else {}, plan)
            else:
                if any(p.name[0] != "." for p in self.out.iterdir()):
                    raise DataError(f"{self.out} is not empty; give a new folder")
                atomic_write(path, json.dumps(plan, indent=1) + "\n")
        except OSError as error:
            raise self._full(error, path) from None
        except Malformed:
            raise DataError(f"{path} is damaged; give a new folder") from None

    def _compare(self, old: dict[str, Any], new: dict[str, Any]) -> None:
        for key, value in new.items():
            if old.get(key) != value:
                said = {"source": "another list of pictures", "count": "another number of pictures"}
                was = said.get(key, f"{key} {old.get(key)!r} instead of {value!r}")
                raise DataError(
                    f"{self.out} was begun with {was}; give the same again, or a new folder"
                )

    def missing(self) -> list[int]:
        """Return the shards that are not finished."""
        return [k for k in range(self.shards) if self._finished(k) is None]

    def _paths(self, k: int) -> tuple[Path, Path]:
        return self.out / f"shard-{k:05d}.safetensors", self.out / f"shard-{k:05d}.json"

    def _finished(self, k: int) -> dict[str, Any] | None:
        shard, note = self._paths(k)
        try:
            said = json_of(note.read_bytes())
            size = shard.stat().st_size if said["count"] else 0
            return said if size == said["bytes"] else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, k: int) -> None:
        """Encode shard `k` and write it.

        Raises:
            DataError: The disk is full; finished shards are kept.
        """
        shard, note = self._paths(k)
        tensors, sums, skipped = self._encode(k)
        count = len(tensors["latents"]) if tensors else 0
        from safetensors.torch import save

        data = save(tensors) if count else b""
        said = {
            "count": count,
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "sums": sums,
            "skipped": skipped,
        }
        try:
            if count:
                atomic_write(shard, data)
            atomic_write(note, json.dumps(said) + "\n")
        except OSError as error:
            raise self._full(error, shard, len(data)) from None

    def _full(self, error: OSError, path: Path, size: int = 0) -> DataError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            kept = self.shards - len(self.missing()) if self.out.exists() else 0
            return DataError(
                f"the disk of {self.out} is full: {path.name} needs {max(size >> 20, 1)} MB; free "
                f"some and run the same command again, which keeps the {kept} finished shards"
            )
        return DataError(f"{path} cannot be written: {error.strerror}")

    def _encode(self, k: int) -> tuple[dict[str, Tensor], dict[str, Any], list[list[str]]]:
        size = self.settings.size
        start, stop = k * self.settings.shard, (k + 1) * self.settings.shard
        parts: dict[str, list[Tensor]] = {}
        labels: list[int] = []
        captions: list[tuple[str, ...]] = []
        skipped: list[list[str]] = []
        sums = np.zeros((2, self.vae.channels))
        with ThreadPoolExecutor(self.threads) as pool:
            loaded = ahead(pool, lambda raw: load(raw, size), self.source.read(start, stop), 64)
            while chunk := list(itertools.islice(loaded, self.batch)):
                good = [item for item in chunk if item.pixels is not None]
                skipped += [[i.raw.name, i.reason] for i in chunk if i.pixels is None]
                if good:
                    self._encode_batch(good, parts, sums)
                    for raw in (i.raw for i in good if i.raw.label is not None):
                        if not 0 <= raw.label < 2**31:
                            raise DataError(f"{raw.name} has class {raw.label}; expected 0 or more")
                        labels.append(raw.label)
                    captions += [i.raw.captions for i in good]
                self.progress(len(chunk))
        tensors = {name: torch.cat(values).contiguous() for name, values in parts.items()}
        if self.source.labelled:
            tensors["labels"] = torch.tensor(labels, dtype=torch.int32)
        if self.text is not None and tensors:
            tensors |= self._caption_tensors(captions)
        pixels = tensors["latents"][0, 0].numel() * len(tensors["latents"]) if parts else 0
        total = {
            "n": pixels,
            "sum": sums[0].tolist(),
            "square": sums[1].tolist(),
            "label": max(labels, default=-1),
        }
        return (tensors if parts else {}), total, skipped

    def _encode_batch(
        self, items: list[Loaded], parts: dict[str, list[Tensor]], sums: np.ndarray[Any, Any]
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
            flat = [caption for item in items for caption in self._chosen(item.raw.captions)]
            text = self.text(flat).half().cpu()
            parts.setdefault("text", []).append(text.unflatten(0, (len(items), -1)))

    def _stored(self, moments: Tensor, items: list[Loaded], stream: str) -> Tensor:
        dtype = getattr(torch, self.settings.dtype)
        if self.settings.kind == "moments":
            return moments.to(dtype)
        from routing.rng import Draws

        # Keyed by the picture, so that a shard comes out the same whoever encodes it.
        keys = [hashlib.sha256(item.raw.name.encode()).digest()[:7] for item in items]
        index = torch.tensor([int.from_bytes(key, "little") for key in keys])
        mean, log_variance = moments.chunk(2, 1)
        noise = Draws(0, 0, index).normal(stream, tuple(mean.shape[1:]))
        return (mean + (log_variance.clamp(-30, 20) / 2).exp() * noise).to(dtype)

    def _chosen(self, captions: tuple[str, ...]) -> list[str]:
        if not captions:
            raise DataError("a picture has no caption; task=text needs one for each")
        return list(itertools.islice(itertools.cycle(captions), self.settings.captions))

    def _caption_tensors(self, captions: list[tuple[str, ...]]) -> dict[str, Tensor]:
        flat = [caption.encode() for row in captions for caption in self._chosen(row)]
        ends = torch.tensor([len(caption) for caption in flat]).cumsum(0)
        data = np.frombuffer(b"".join(flat) or b" ", np.uint8).copy()
        return {
            "captions": torch.from_numpy(data),
            "caption_ends": ends.view(len(captions), self.settings.captions),
        }

    def finish(self) -> Manifest | None:
        """Write the manifest if every shard is there; return it, or None while some are missing.

        Raises:
            DataError: Not one picture could be read, or the disk is full.
        """
        notes = [self._finished(k) for k in range(self.shards)]
        done = [note for note in notes if note is not None]
        if len(done) < self.shards:
            return None
        skipped = [entry for note in done for entry in note["skipped"]]
        count = sum(note["count"] for note in done)
        if not count:
            raise DataError(
                f"none of {self.source.count} pictures could be read; the first, {skipped[0][0]}: "
                f"{skipped[0][1]}"
            )
        manifest = self._manifest(done, count, len(skipped))
        try:
            listed = "".join(f"{name}\t{reason}\n" for name, reason in skipped)
            atomic_write(self.out / SKIPPED, listed)
            atomic_write(self.out / MANIFEST, manifest.dumps())
        except OSError as error:
            raise self._full(error, self.out / MANIFEST) from None
        return manifest

    def _manifest(self, done: list[dict[str, Any]], count: int, skipped: int) -> Manifest:
        n = sum(note["sums"]["n"] for note in done)
        first = np.sum([note["sums"]["sum"] for note in done], 0) / n
        second = np.sum([note["sums"]["square"] for note in done], 0) / n
        side = self.settings.size // self.vae.factor
        kept = ("count", "bytes", "sha256")
        return Manifest(
            kind=self.settings.kind,
            shape=(self.vae.channels, side, side),
            count=count,
            flips=self.settings.flips,
            labels=self.source.labelled,
            classes=self._classes(max(note["sums"]["label"] for note in done)),
            text=self._text(),
            vae=self.settings.vae,
            scale_factor=self.vae.scale_factor,
            shift_factor=self.vae.shift_factor,
            image_size=self.settings.size,
            mean=tuple(first.tolist()),
            std=tuple(np.sqrt(second - first**2).tolist()),
            source=self.source.fingerprint,
            skipped=skipped,
            shards=tuple(
                {"file": self._paths(k)[0].name, **{key: note[key] for key in kept}}
                for k, note in enumerate(done)
                if note["count"]
            ),
        )

    def _classes(self, highest: int) -> tuple[str, ...]:
        if not self.source.labelled:
            return ()
        return self.source.classes or tuple(str(k) for k in range(highest + 1))

    def _text(self) -> dict[str, Any] | None:
        if self.text is None:
            return None
        shape = [self.settings.captions, self.text.length, self.text.width]
        return {"encoder": self.text.name, "shape": shape}
