"""Pictures to a latent store, shard by shard: each one is whole or absent, so a kill loses one.

Shard k holds pictures k S .. (k+1) S - 1 of the source without those that cannot be read. It is
written first, then a small JSON beside it with its checksum and sums; the manifest comes last, from
the JSONs alone, by whichever process finds all of them. Processes share nothing but the folder.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import warnings
from collections import defaultdict
from collections.abc import Iterator
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
from experiments.data.latents_spec import (
    FORMAT,
    MANIFEST,
    Manifest,
    StoredShard,
    StoredText,
    first_class_empty,
)
from experiments.data.picture_sources import PictureSource, RawPicture, crop_ahead
from experiments.runtime.files import atomic_write
from experiments.runtime.parsing import Malformed, is_number, json_of
from routing.rng import Draws


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
    """Encodes the pictures of a source into a folder, which `threads` decode and crop."""

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
        self.shards = -(-source.count // settings.shard)
        # What is made here is written down, and a folder where something else was begun refused.
        plan = {"format": FORMAT, "source": source.fingerprint, "count": source.count}
        plan |= asdict(settings)
        path = out / "plan.json"
        if not path.exists():
            atomic_write(path, json.dumps(plan, indent=1) + "\n")
        try:
            # Older plans do not say how long their captions are.
            old = {"text_length": settings.text_length, **json_of(path.read_bytes())}
        except (Malformed, TypeError):
            raise DataError(f"{path} is damaged; give a new folder") from None
        for key, value in plan.items():
            was = f"{key} {old.get(key)!r} instead of {value!r}"
            if key == "source":
                was = "another list of pictures, other captions or columns"
            again = "give the same again, or a new folder"
            require(old.get(key) == value, f"{out} was begun with {was}; {again}")

    def missing(self) -> list[int]:
        """Return the shards that are not finished."""
        return [k for k in range(self.shards) if self._finished(k) is None]

    def _path(self, k: int) -> Path:
        return self.out / f"shard-{k:05d}.safetensors"

    def _finished(self, k: int) -> dict[str, Any] | None:
        try:
            note = json_of(self._path(k).with_suffix(".json").read_bytes())
            size = self._path(k).stat().st_size if note["count"] else 0
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return note if self._is_whole(note) and size == note["bytes"] else None

    def _is_whole(self, note: dict[str, Any]) -> bool:
        """Return whether the note of a shard has all that the manifest needs, of its types."""
        sums, skipped = note.get("sums"), note.get("skipped")
        if not isinstance(sums, dict) or not isinstance(skipped, list):
            return False
        counts = (note["count"], note.get("bytes"), sums.get("n"))
        totals: list[Any] = [sums.get("sum"), sums.get("square")]
        return (
            all(type(count) is int and count >= 0 for count in counts)
            and type(sums.get("label")) is int
            and type(sums.get("lowest")) in (int, type(None))
            and isinstance(note.get("sha256"), str)
            and all(isinstance(t, list) and len(t) == self.vae.channels for t in totals)
            and all(is_number(value) for total in totals for value in total)
            and all(
                isinstance(entry, list)
                and len(entry) == 2
                and all(isinstance(text, str) for text in entry)
                for entry in skipped
            )
        )

    def write(self, k: int) -> Iterator[int]:
        """Encode shard `k` and write it; give the number of pictures of each batch on the way."""
        start = k * self.settings.shard
        stop = min(start + self.settings.shard, self.source.count)
        parts: dict[str, list[Tensor]] = defaultdict(list)
        skipped: list[list[str]] = []
        labels: list[int] = []
        captions: list[bytes] = []
        sums = np.zeros((2, self.vae.channels))
        with ThreadPoolExecutor(self.threads) as pool:
            cropped = crop_ahead(pool, self.source.read(start, stop), self.settings.size)
            while chunk := list(itertools.islice(cropped, self.batch)):
                skipped += [[one.raw.name, one.reason] for one in chunk if one.pixels is None]
                good = [one.raw for one in chunk if one.pixels is not None]
                labels += [raw.label for raw in good if raw.label is not None]
                if good:
                    pixels = np.stack([one.pixels for one in chunk if one.pixels is not None])
                    made = self._encode(torch.from_numpy(pixels).permute(0, 3, 1, 2), good, sums)
                    for name, tensor in made.items():
                        parts[name].append(tensor)
                    if self.text is not None:
                        chosen = self._captions(good)
                        captions += map(str.encode, chosen)
                        text = self.text(chosen).half().cpu()
                        parts["text"].append(text.unflatten(0, (len(good), -1)))
                yield len(chunk)
        tensors = {name: torch.cat(values).contiguous() for name, values in parts.items()}
        count = len(tensors["latents"]) if tensors else 0
        if tensors and self.source.labelled:
            tensors["labels"] = torch.tensor(labels, dtype=torch.int32)
        if tensors and self.text is not None:  # UTF-8 bytes of all captions, and where each ends
            data = np.frombuffer(b"".join(captions) or b" ", np.uint8).copy()
            tensors["captions"] = torch.from_numpy(data)
            tensors["caption_ends"] = torch.tensor(list(map(len, captions))).cumsum(0)
            tensors["caption_ends"] = tensors["caption_ends"].view(count, -1)
        content = save(tensors) if tensors else b""
        if tensors:
            atomic_write(self._path(k), content)
        total = {
            "n": tensors["latents"][:, 0].numel() if tensors else 0,
            "sum": sums[0].tolist(),
            "square": sums[1].tolist(),
            "label": max(labels, default=-1),
            "lowest": min(labels, default=None),
        }
        digest = hashlib.sha256(content).hexdigest()
        about = {"count": count, "bytes": len(content), "sha256": digest}
        about |= {"sums": total, "skipped": skipped}
        atomic_write(self._path(k).with_suffix(".json"), json.dumps(about) + "\n")

    def _encode(
        self, images: Tensor, pictures: list[RawPicture], sums: NDArray[Any]
    ) -> dict[str, Tensor]:
        """Return latents of images (B, 3, H, W), and add to the `sums` for mean and std."""
        moments = self.vae.encode(images).cpu()
        mean, log_variance = moments.double().chunk(2, 1)
        sums[0] += mean.sum((0, 2, 3)).numpy()
        second = mean.square() + log_variance.clamp(-30, 20).exp()
        sums[1] += second.sum((0, 2, 3)).numpy()
        made = {"latents": (moments, "straight")}
        if self.settings.flips:
            made["latents_flip"] = (self.vae.encode(images.flip(-1)).cpu(), "flip")
        # Keyed by the picture, so that a shard comes out the same whoever encodes it.
        names = [picture.name.encode("utf-8", "surrogateescape") for picture in pictures]
        keys = [int.from_bytes(hashlib.sha256(name).digest()[:7], "little") for name in names]
        stored = {}
        for name, (found, stream) in made.items():
            if self.settings.kind == "sample":
                found = sample_moments(found, Draws(0, 0, torch.tensor(keys)), stream)
            stored[name] = found.to(getattr(torch, self.settings.dtype))
            for picture, latent in zip(pictures, stored[name], strict=True):
                finite = bool(latent.isfinite().all())
                said = f"{picture.name} has latents that are not finite in {self.settings.dtype}"
                require(finite, f"{said}; try --dtype float32, or another --vae")
        return stored

    def _captions(self, pictures: list[RawPicture]) -> list[str]:
        """Return as many captions of each picture as are stored; fewer begin again."""
        bare = [picture.name for picture in pictures if not picture.captions]
        if bare:
            raise DataError(f"{bare[0]} has no caption; --text needs one for every picture")
        count = self.settings.captions
        chosen = (itertools.islice(itertools.cycle(p.captions), count) for p in pictures)
        # A text that was cut off inside a pair of JSON's \u escapes ends in half a character.
        return [said.encode("utf-8", "replace").decode() for few in chosen for said in few]

    def finish(self) -> Manifest | None:
        """Write the manifest if every shard is there; return it, or None while some are missing."""
        done = [note for k in range(self.shards) if (note := self._finished(k)) is not None]
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
        first, second = (
            np.sum([note["sums"][key] for note in done], 0) / n for key in ("sum", "square")
        )
        side = self.settings.size // self.vae.factor
        highest = max(note["sums"]["label"] for note in done)
        text, of = self.text, (self.settings.captions,)
        # Shards of older versions do not say it.
        lowest = [note["sums"].get("lowest") for note in done]
        starts = [label for label in lowest if label is not None]
        if starts and min(starts) > 0:
            warnings.warn(first_class_empty("the", min(starts)), stacklevel=2)
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
                StoredShard(self._path(k).name, note["count"], note["bytes"], note["sha256"])
                for k, note in enumerate(done)
                if note["count"]
            ),
        )
        listed = "".join(f"{name}\t{reason}\n" for name, reason in skipped)
        atomic_write(self.out / "skipped.txt", listed.encode("utf-8", "surrogateescape"))
        atomic_write(self.out / MANIFEST, manifest.dumps())
        return manifest
