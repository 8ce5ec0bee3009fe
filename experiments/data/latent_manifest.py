"""Description of a latent store before it is opened: layout, manifest and headers (no torch).

A prepared store has a manifest. Shards of other projects are described by the header of the first.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt
from safetensors import safe_open

from backbones.parsing import bytes_of, check_file, json_of
from backbones.validation import OptionError, validate
from experiments.data.class_folders import refuse_split_files
from experiments.data.data_options import DataError, require
from experiments.runtime.files import visible_files

FORMAT = "tread-latents/1"
MANIFEST = "manifest.json"

Shape = tuple[int, int, int]
Size = Annotated[int, Ge(1)]
Scale = Annotated[float, Gt(0)]


@dataclass(frozen=True)
class StoredText:
    """The captions of a store."""

    encoder: str  # name of the text encoder
    shape: tuple[Size, Size, Size]  # K captions per sample, L tokens, E channels


@dataclass(frozen=True)
class StoredShard:
    """One file of a store."""

    file: str
    count: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Contents of a prepared store."""

    kind: Literal["moments", "sample"]  # moments: mean and log variance, 2 C channels
    shape: tuple[Size, Size, Size]  # (C, H, W) of a latent
    count: Size  # number of samples
    flips: bool  # whether `latents_flip` are stored
    labels: bool  # whether `labels` are stored
    classes: tuple[str, ...]  # names of classes
    text: StoredText | None  # None for a store without captions
    vae: str  # name of the autoencoder
    scale_factor: Scale  # multiplies `latent - shift_factor` to about unit standard deviation
    shift_factor: float  # subtracted first; 0 for Stable Diffusion's VAE
    image_size: int  # side of the images in pixels
    mean: tuple[float, ...]  # mean of latents per channel, before scaling
    std: tuple[Scale, ...]  # standard deviation of latents per channel, before scaling
    source: str  # fingerprint of the image source
    skipped: int  # number of unreadable images
    shards: tuple[StoredShard, ...]

    def check_consistency(self) -> None:
        """Refuse entries that contradict each other, and shards outside the store."""
        stored_count = sum(shard.count for shard in self.shards)
        if (
            len(self.mean) != self.shape[0]
            or len(self.std) != self.shape[0]
            or stored_count != self.count
            or any(Path(shard.file).name != shard.file for shard in self.shards)
        ):
            raise OptionError("the entries of the manifest contradict each other")

    def dumps(self) -> str:
        """Return the manifest as JSON."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    def summary(self, folder: Path) -> str:
        """Return a description of the store in `folder` for the console."""
        shape = "x".join(map(str, self.shape))
        mirrored = ", mirrored too" if self.flips else ""
        size = sum(shard.bytes for shard in self.shards) / 2**30
        mean = "  ".join(f"{value:.4f}" for value in self.mean)
        std = "  ".join(f"{value:.4f}" for value in self.std)
        captions = f"{list(self.text.shape)} by {self.text.encoder}" if self.text else "none"
        lines = [
            f"{folder}: {self.count:,} images as {self.kind} of {shape}{mirrored}",
            f"classes   {len(self.classes) if self.labels else 'none'}",
            f"mean      {mean}",
            f"std       {std}",
            f"scaled    std {max(self.std) * self.scale_factor:.3f} at most",
            f"shards    {len(self.shards)}, {size:.2f} GB",
            f"captions  {captions}",
            f"skipped   {self.skipped} unreadable images, listed in {folder / 'skipped.txt'}",
        ]
        return "\n".join(lines)

    @classmethod
    def read(cls, folder: Path) -> tuple[Manifest, str]:
        """Return the validated manifest of a store, and the first digits of its SHA-256."""
        path = folder / MANIFEST
        try:
            content = bytes_of(path)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from None
        try:
            values = json_of(content)
            version = values.pop("format", None)
        except (TypeError, ValueError, AttributeError):
            raise _damaged(path) from None
        require(version == FORMAT, f"{path} has format {version!r}; this version reads {FORMAT!r}")
        try:
            manifest = validate(cls, values)
        except OptionError:
            raise _damaged(path) from None
        return manifest, hashlib.sha256(content).hexdigest()[:16]


def _damaged(path: Path) -> DataError:
    return DataError(f"{path} is damaged; run prepare again, which keeps finished shards")


def low_label_warning(subject: str, lowest: int) -> str:
    """Return the warning for labels that start at `lowest` instead of 0."""
    empty = "class 0 has" if lowest == 1 else f"classes 0 to {lowest - 1} have"
    return (
        f"{subject} smallest label is {lowest}, so {empty} no sample but a row of the model's "
        "embedding; if the labels are meant to count from 1, subtract 1 where they are stored"
    )


def store_layout(folder: Path) -> Literal["prepared", "shards"]:
    """Return the layout of a latent store: prepared, or shards (LightningDiT's)."""
    require(
        folder.is_dir(), f"{folder} is no folder; data.path expects the folder of a latent store"
    )
    names = [entry.name for entry in visible_files(folder, "*")]
    if MANIFEST in names:
        return "prepared"
    require(
        "plan.json" not in names,
        f"{folder}: prepare has not finished here; run the same command again to continue it",
    )
    suffixes = {Path(name).suffix for name in names}
    if ".safetensors" in suffixes:
        refuse_split_files(folder, visible_files(folder, "*.safetensors"))
        return "shards"
    listed = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    raise DataError(
        f"{folder}: no latents found; expected manifest.json (from prepare) or *.safetensors "
        f"(latents, labels); found {listed or 'nothing'}; from images, or latents in tars and .npy "
        f"files, python experiments/prepare.py {folder} OUT makes them, and data=folder "
        f"data.path={folder} trains on small pictures without a VAE"
    )


def stored_shape(folder: Path, kind: str) -> tuple[str, Shape]:
    """Return the kind and (C, H, W) of a third-party store from its first header."""
    shard = visible_files(folder, "*.safetensors")[0]
    check_file(shard)
    with safe_open(shard, "numpy") as file:
        row_shape = tuple(file.get_slice("latents").get_shape()[1:])
    return moments_or_sample(row_shape, kind, str(folder))


def moments_or_sample(row_shape: tuple[int, ...], kind: str, source: str) -> tuple[str, Shape]:
    """Return the kind and (C, H, W) of latents for stored rows of shape `row_shape`."""
    moments = kind == "moments" or (kind == "auto" and row_shape[:1] == (8,))
    if len(row_shape) != 3 or min(row_shape) < 1 or (moments and row_shape[0] % 2):
        twice = ", of moments twice the channels" if moments else ""
        raise DataError(
            f"{source} holds rows of {list(row_shape)}; expected [C, H, W] such as [4, 32, 32]"
            f"{twice}"
        )
    channels, height, width = row_shape
    if moments:
        return "moments", (channels // 2, height, width)
    return "sample", (channels, height, width)
