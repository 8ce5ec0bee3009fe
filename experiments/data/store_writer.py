"""Write images to a latent store, shard by shard; each shard is whole or absent.

Shard k holds images k S .. (k+1) S - 1 of the source, except unreadable ones. It is written first,
then a small JSON file beside it with its checksum and sums. The manifest is written last, from the
JSON files alone, by whichever process finds all of them. Processes share nothing but the folder.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor

from backbones.parsing import Malformed, json_of
from backbones.validation import validate
from experiments.data.data_options import DataError, require
from experiments.data.encoders import Autoencoder, TextEncoder, sample_moments
from experiments.data.image_sources import ImageSource
from experiments.data.latent_manifest import (
    FORMAT,
    MANIFEST,
    Manifest,
    StoredShard,
    StoredText,
    low_label_warning,
)
from experiments.data.raw_images import CroppedImage, RawImage, crop_ahead
from experiments.runtime.files import atomic_write
from routing.errors import UserError
from routing.rng import Draws

Count = Annotated[int, Ge(0)]


@dataclass(frozen=True)
class StoreSettings:
    """Settings that must be equal for a preparation to continue."""

    vae: str  # name or folder of the autoencoder
    size: int  # side of the cropped images in pixels
    kind: str  # `moments`, from which every training step samples, or one `sample`
    flips: bool  # also store latents of mirrored images
    dtype: str  # `float16` or `float32` on disk
    shard: int  # images per shard
    text: str | None  # name or folder of the text encoder, or None
    captions: int  # captions stored per image
    text_length: int  # tokens per caption


@dataclass(frozen=True)
class ShardSums:
    """Sums over the latents and labels of a shard."""

    n: Count  # number of values per channel
    sum: tuple[float, ...]  # per channel
    square: tuple[float, ...]  # second moment per channel, times n
    label: int  # highest label; -1 without labels
    lowest: int | None = None  # lowest label; shards of older versions lack it


@dataclass(frozen=True)
class ShardRecord:
    """The JSON file beside a finished shard: its size, checksum, sums and unreadable images."""

    count: Count  # number of samples
    bytes: Count
    sha256: str
    sums: ShardSums
    skipped: tuple[tuple[str, str], ...]  # name and reason
    source: str = ""  # digest of its images; shards of older versions lack it


class ShardContent:
    """Collects the encoded images of one shard."""

    def __init__(self, channels: int) -> None:
        self.batches: dict[str, list[Tensor]] = defaultdict(list)
        self.labels: list[int] = []
        self.captions: list[bytes] = []
        self.skipped: list[tuple[str, str]] = []
        self.channel_sums = np.zeros((2, channels))  # of the latents, and of their second moments

    def tensors(self, labelled: bool) -> dict[str, Tensor]:
        """Return the tensors of the shard; none without a readable image."""
        if not self.batches:
            return {}
        tensors = {name: torch.cat(parts).contiguous() for name, parts in self.batches.items()}
        if labelled:
            tensors["labels"] = torch.tensor(self.labels, dtype=torch.int32)
        if "text" in tensors:  # UTF-8 bytes of all captions, and where each one ends
            data = np.frombuffer(b"".join(self.captions) or b" ", np.uint8).copy()
            ends = torch.tensor(list(map(len, self.captions))).cumsum(0)
            tensors["captions"] = torch.from_numpy(data)
            tensors["caption_ends"] = ends.view(len(tensors["latents"]), -1)
        return tensors

    def sums(self, tensors: dict[str, Tensor]) -> ShardSums:
        """Return the sums over latents and labels."""
        return ShardSums(
            n=tensors["latents"][:, 0].numel() if tensors else 0,
            sum=tuple(self.channel_sums[0].tolist()),
            square=tuple(self.channel_sums[1].tolist()),
            label=max(self.labels, default=-1),
            lowest=min(self.labels, default=None),
        )


class StoreWriter:
    """Encodes the images of a source into a folder.

    Args:
        source: The images.
        vae: The autoencoder.
        out: Folder of the store.
        settings: Settings of the store.
        text: Encoder of the captions, or None.
        batch: Images encoded at a time.
        threads: Threads that decode and crop images.
    """

    def __init__(
        self,
        source: ImageSource,
        vae: Autoencoder,
        out: Path,
        settings: StoreSettings,
        text: TextEncoder | None,
        batch: int,
        threads: int,
    ) -> None:
        nearest = max(settings.size // vae.factor, 1) * vae.factor
        require(
            settings.size % vae.factor == 0,
            f"--size {settings.size} is not a multiple of the VAE's factor {vae.factor}; try "
            f"--size {nearest}",
        )
        require(
            text is None or source.captioned,
            "--text needs a caption for every image; give them with --captions",
        )
        self.source, self.vae, self.out, self.settings = source, vae, out, settings
        self.text, self.batch, self.threads = text, batch, threads
        self.shards = -(-source.count // settings.shard)
        self._check_plan()

    def _check_plan(self) -> None:
        """Record the plan of a new store; refuse to continue a store with another plan."""
        plan = {
            "format": FORMAT,
            "source": self.source.fingerprint,
            "count": self.source.count,
            **asdict(self.settings),
        }
        path = self.out / "plan.json"
        if not path.exists():
            atomic_write(path, json.dumps(plan, indent=1) + "\n")
        try:
            # Older plans lack the length of captions.
            begun = {"text_length": self.settings.text_length, **json_of(path.read_bytes())}
        except (Malformed, TypeError):
            raise DataError(f"{path} is damaged; give a new folder") from None
        for key, value in plan.items():
            difference = f"{key} {begun.get(key)!r} instead of {value!r}"
            if key == "source":
                difference = "another list of images, other captions or columns"
            require(
                begun.get(key) == value,
                f"{self.out} was started with {difference}; use the same, or a new folder",
            )

    def forget_changed(self, numbers: Sequence[int]) -> tuple[int, int]:
        """Make those of these shards unfinished whose images have changed since.

        Returns:
            How many they are, and how many shards of older versions cannot tell.
        """
        changed = unknown = 0
        for number in numbers:
            record = self._record(number)
            if record is None:
                continue
            if not record.source:
                unknown += 1
            elif record.source != self._digest(number):
                # The manifest goes first: it must not describe a store that is being changed.
                (self.out / MANIFEST).unlink(missing_ok=True)
                self._path(number).with_suffix(".json").unlink()
                changed += 1
        return changed, unknown

    def _range(self, number: int) -> tuple[int, int]:
        """Return the first image of a shard, and the one after its last."""
        start = number * self.settings.shard
        return start, min(start + self.settings.shard, self.source.count)

    def _digest(self, number: int) -> str:
        return self.source.digest(*self._range(number))

    def missing(self) -> list[int]:
        """Return the numbers of unfinished shards."""
        return [number for number in range(self.shards) if self._record(number) is None]

    def _path(self, number: int) -> Path:
        return self.out / f"shard-{number:05d}.safetensors"

    def _record(self, number: int) -> ShardRecord | None:
        """Return the record of a finished shard; None for a missing or damaged one."""
        path = self._path(number)
        try:
            values = json_of(path.with_suffix(".json").read_bytes())
            record: ShardRecord = validate(ShardRecord, values)
            size = path.stat().st_size if record.count else 0
        except (OSError, UserError):
            return None
        sums, channels = record.sums, self.vae.channels
        complete = size == record.bytes and len(sums.sum) == len(sums.square) == channels
        return record if complete else None

    def write(self, number: int) -> Iterator[int]:
        """Encode one shard and write it; yield the number of images of each batch."""
        start, stop = self._range(number)
        source, content = self._digest(number), ShardContent(self.vae.channels)
        with ThreadPoolExecutor(self.threads) as pool:
            cropped = crop_ahead(pool, self.source.read(start, stop), self.settings.size)
            while True:
                batch = list(itertools.islice(cropped, self.batch))
                if not batch:
                    break
                self._add_batch(batch, content)
                yield len(batch)
        tensors = content.tensors(self.source.labelled)
        data = save(tensors) if tensors else b""
        if tensors:
            atomic_write(self._path(number), data)
        record = ShardRecord(
            count=len(tensors["latents"]) if tensors else 0,
            bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            sums=content.sums(tensors),
            skipped=tuple(content.skipped),
            source=source,
        )
        atomic_write(self._path(number).with_suffix(".json"), json.dumps(asdict(record)) + "\n")

    def _add_batch(self, batch: list[CroppedImage], content: ShardContent) -> None:
        """Encode one batch of images into the content of a shard."""
        images: list[RawImage] = []
        pixels = []
        for cropped in batch:
            if cropped.pixels is None:
                content.skipped.append((_printable(cropped.raw.name), cropped.reason))
                continue
            images.append(cropped.raw)
            pixels.append(cropped.pixels)
            if cropped.raw.label is not None:
                content.labels.append(cropped.raw.label)
        if not images:
            return
        pixel_tensor = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)
        latents = self._encode(pixel_tensor, images, content.channel_sums)
        for name, tensor in latents.items():
            content.batches[name].append(tensor)
        if self.text is not None:
            captions = self._captions(images)
            content.captions += map(str.encode, captions)
            text = self.text(captions).half().cpu()
            content.batches["text"].append(text.unflatten(0, (len(images), -1)))

    def _encode(
        self, pixels: Tensor, images: list[RawImage], channel_sums: NDArray[Any]
    ) -> dict[str, Tensor]:
        """Return the latents of pixels (B, 3, H, W), and add to the sums for mean and std."""
        moments = self.vae.encode(pixels).cpu()
        mean, log_variance = moments.double().chunk(2, 1)
        channel_sums[0] += mean.sum((0, 2, 3)).numpy()
        second_moment = mean.square() + log_variance.clamp(-30, 20).exp()
        channel_sums[1] += second_moment.sum((0, 2, 3)).numpy()
        encoded = {"latents": (moments, "straight")}
        if self.settings.flips:
            encoded["latents_flip"] = (self.vae.encode(pixels.flip(-1)).cpu(), "flip")
        stored = {}
        for name, (latents, stream) in encoded.items():
            if self.settings.kind == "sample":
                latents = sample_moments(latents, Draws(0, 0, _noise_keys(images)), stream)
            stored[name] = latents.to(getattr(torch, self.settings.dtype))
            for image, latent in zip(images, stored[name], strict=True):
                require(
                    bool(latent.isfinite().all()),
                    f"{image.name} has latents that are not finite in {self.settings.dtype}; try "
                    "--dtype float32, or another --vae",
                )
        return stored

    def _captions(self, images: list[RawImage]) -> list[str]:
        """Return the stored captions of each image; if there are too few, they repeat."""
        captions = []
        for image in images:
            require(
                bool(image.captions),
                f"{image.name} has no caption; --text needs one for every image",
            )
            for text in itertools.islice(itertools.cycle(image.captions), self.settings.captions):
                # Text that was cut inside a pair of JSON's \u escapes ends in half a character.
                captions.append(text.encode("utf-8", "replace").decode())
        return captions

    def finish(self) -> Manifest | None:
        """Write the manifest if all shards are finished; return it, or None."""
        records: list[ShardRecord] = []
        skipped: list[tuple[str, str]] = []
        for number in range(self.shards):
            record = self._record(number)
            if record is None:
                return None
            records.append(record)
            skipped += record.skipped
        if not any(record.count for record in records):
            name, reason = skipped[0]
            raise DataError(
                f"none of {self.source.count} images could be read; the first, {name}: {reason}; "
                "repair them, and run the command again"
            )
        lowest = [record.sums.lowest for record in records if record.sums.lowest is not None]
        if lowest and min(lowest) > 0:
            warnings.warn(low_label_warning("the", min(lowest)), stacklevel=2)
        manifest = self._manifest(records, len(skipped))
        lines = "".join(f"{name}\t{reason}\n" for name, reason in skipped)
        atomic_write(self.out / "skipped.txt", lines)
        atomic_write(self.out / MANIFEST, manifest.dumps())
        return manifest

    def _manifest(self, records: list[ShardRecord], skipped: int) -> Manifest:
        """Return the manifest of finished shards."""
        totals = np.zeros((2, self.vae.channels))
        count = values_per_channel = 0
        highest = -1  # without labels: no classes
        shards = []
        for number, record in enumerate(records):
            totals += (record.sums.sum, record.sums.square)
            values_per_channel += record.sums.n
            count += record.count
            highest = max(highest, record.sums.label)
            if record.count:
                name = self._path(number).name
                shards.append(StoredShard(name, record.count, record.bytes, record.sha256))
        mean, second_moment = totals / values_per_channel
        text = None
        if self.text is not None:
            shape = (self.settings.captions, self.text.length, self.text.width)
            text = StoredText(self.text.name, shape)
        side = self.settings.size // self.vae.factor
        return Manifest(
            kind=self.settings.kind,  # type: ignore[arg-type]
            shape=(self.vae.channels, side, side),
            count=count,
            flips=self.settings.flips,
            labels=self.source.labelled,
            classes=tuple(map(_printable, self.source.classes or map(str, range(highest + 1)))),
            text=text,
            vae=self.settings.vae,
            scale_factor=self.vae.scale_factor,
            shift_factor=self.vae.shift_factor,
            image_size=self.settings.size,
            mean=tuple(mean.tolist()),
            std=tuple(np.sqrt(second_moment - mean**2).tolist()),
            source=self.source.fingerprint,
            skipped=skipped,
            shards=tuple(shards),
        )


def _printable(name: str) -> str:
    """Escape bytes of a file name that are not UTF-8; different names stay different."""
    return name.encode("utf-8", "backslashreplace").decode()


def _noise_keys(images: list[RawImage]) -> Tensor:
    """Return a key of each image's name, so that a shard does not depend on the process."""
    keys = []
    for image in images:
        name = image.name.encode("utf-8", "surrogateescape")
        keys.append(int.from_bytes(hashlib.sha256(name).digest()[:7], "little"))
    return torch.tensor(keys)
