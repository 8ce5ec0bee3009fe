"""Options of data=latents, and what the headers of stores say (no torch here)."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from safetensors import safe_open

from experiments.data.data_options import DataError, DataOptions, ShapeError, require
from experiments.data.tars import LATENT, Member, latent_in, walk
from experiments.options.fields import Key, build
from experiments.runtime.files import sha256, visible_files
from experiments.runtime.parsing import bytes_of, json_of

FORMAT = "tread-latents/1"
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class StoredText:
    """The captions of a store."""

    encoder: str  # what embeds them
    shape: tuple[int, int, int]  # K captions per sample, L tokens, E channels


@dataclass(frozen=True)
class StoredShard:
    """One file of a store."""

    file: str
    count: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a store holds."""

    kind: str  # `moments` (mean and log variance, 2 C channels) or `sample` (C channels)
    shape: tuple[int, int, int]  # (C, H, W) of a latent
    count: int  # number of samples
    flips: bool  # whether `latents_flip` are stored
    labels: bool  # whether `labels` are stored
    classes: tuple[str, ...]  # names of classes
    text: StoredText | None  # None for a store without captions
    vae: str  # which autoencoder made it
    scale_factor: float  # multiplies `latent - shift_factor` to about unit standard deviation
    shift_factor: float  # subtracted first; 0 for Stable Diffusion's VAE
    image_size: int  # side of the pictures in pixels
    mean: tuple[float, ...]  # mean of latents per channel, before scaling
    std: tuple[float, ...]  # standard deviation of latents per channel, before scaling
    source: str  # where the pictures came from
    skipped: int  # how many could not be read
    shards: tuple[StoredShard, ...]

    def dumps(self) -> str:
        """Return the manifest as JSON."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    def summary(self, out: Path) -> str:
        """Return what was made at `out`, for people."""
        text, sides = self.text, "x".join(map(str, self.shape))
        mirrored = ", mirrored too" if self.flips else ""
        said = {
            f"{out}:": f"{self.count:,} pictures as {self.kind} of {sides}{mirrored}",
            "classes  ": len(self.classes) if self.labels else "none",
            "mean     ": "  ".join(f"{value:.4f}" for value in self.mean),
            "std      ": "  ".join(f"{value:.4f}" for value in self.std),
            "scaled   ": f"std {max(self.std) * self.scale_factor:.3f} at most",
            "shards   ": f"{len(self.shards)}, {sum(s.bytes for s in self.shards) / 2**30:.2f} GB",
            "captions ": f"{list(text.shape)} by {text.encoder}" if text else "none",
            "skipped  ": f"{self.skipped} that cannot be read, listed in {out / 'skipped.txt'}",
        }
        return "\n".join(f"{name} {value}" for name, value in said.items())

    @classmethod
    def read(cls, folder: Path) -> tuple[Manifest, str]:
        """Return the manifest of a store, checked, and the start of its SHA-256."""
        path = folder / MANIFEST
        try:
            content = bytes_of(path)
            values = json_of(content)
            found = values.pop("format", None)
            require(found == FORMAT, f"{path} has format {found!r}; this version reads {FORMAT!r}")
            manifest = build(cls, values)
            sides = (manifest.shape, *([manifest.text.shape] if manifest.text else []))
            good = (
                manifest.kind in ("moments", "sample")
                and all(len(shape) == 3 and min(shape) > 0 for shape in sides)
                and len(manifest.mean) == len(manifest.std) == manifest.shape[0]
                and sum(shard.count for shard in manifest.shards) == manifest.count > 0
                and all(Path(shard.file).name == shard.file for shard in manifest.shards)
                and all(0 < v < math.inf for v in (*manifest.std, manifest.scale_factor))
                and all(math.isfinite(v) for v in (*manifest.mean, manifest.shift_factor))
            )
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from None
        except DataError:
            raise
        except (TypeError, ValueError, AttributeError):
            good = False
        if not good:
            raise DataError(f"{path} is damaged; run prepare again, which keeps finished shards")
        return manifest, hashlib.sha256(content).hexdigest()[:16]


@dataclass(frozen=True)
class LatentsOptions(DataOptions):
    """Precomputed VAE latents: ImageNet-256 (4x32x32), ImageNet-512 (4x64x64), COCO.

    `experiments/conf/data/latents.yaml` explains each option.
    """

    name: str = "latents"
    path: str | None = None
    shape: Sequence[int] | None = None
    test: str | None = None
    held_out: Annotated[int, Key(least=0, tip=5000)] = 0
    flip: Annotated[str, Key(among=("auto", "mirror", "none"))] = "auto"
    scale: Annotated[str, Key(among=("factor", "std"))] = "factor"
    scale_factor: Annotated[float | None, Key(above=0, tip=0.18215)] = None
    scaled: Annotated[str, Key(among=("auto", "yes", "no"))] = "auto"
    kind: Annotated[str, Key(among=("auto", "sample", "moments"))] = "auto"
    num_classes: Annotated[int | None, Key(least=0, tip=1000)] = None
    vae: str = "auto"
    vae_dtype: Annotated[str, Key(among=("float32", "bfloat16"))] = "float32"
    decode_batch: Annotated[int, Key(least=1)] = 16
    verify: bool = False

    # Where there is no store yet: ImageNet-256 under a VAE that divides the side by 8; 77 tokens
    # of CLIP for captioned sets.
    sample_shape = (4, 32, 32)
    class_count = 1000
    caption_shape = (77, 768)
    dataset = "experiments.data.latents.Latents"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.shape is None
            or (len(self.shape) == 3 and all(type(n) is int and n > 0 for n in self.shape)),
            f"data.shape={self.shape}: expected null or three sizes such as data.shape=[32,16,16]",
        )
        require(
            self.held_out == 0 or self.test is None,
            "data.held_out and data.test are both set; set data.held_out=0 to use the store of "
            "data.test",
        )

    def describe(self) -> dict[str, Any]:
        """Return what the headers say; a store that is not there yet counts as ImageNet-256.

        Raises:
            ShapeError: The latents are of another shape than `data.shape`.
        """
        known, manifest, found = super().describe(), None, None
        folder = Path(str(self.path)).expanduser()
        # Nothing there, or damaged: opening the data set for real names what is wrong with it.
        with suppress(Exception):
            if (folder / MANIFEST).exists():
                manifest = Manifest.read(folder)[0]
            found = list(manifest.shape if manifest else stored_shape(folder, self.kind)[1])
        known["shape"] = wanted = list(self.shape or found or known["shape"])
        if found and found != wanted:
            there, asked = ("x".join(map(str, shape)) for shape in (found, wanted))
            raise ShapeError(
                f"data.shape={wanted}: the latents in {self.path} are {there}, and a "
                "model of their size would be another one at another cost; give data.path "
                f"latents of {asked} (VA-VAE f16d32 makes 32x16x16 of 256x256 pixels)"
            )
        if manifest:
            known["num_classes"] = len(manifest.classes)
            known["text"] = list(manifest.text.shape)[1:] if manifest.text else None
        known["num_classes"] = self.num_classes or known["num_classes"]
        return known

    def check(self) -> None:
        """Refuse stores that are not there, or whose manifest is damaged."""
        require(bool(self.path), "data=latents needs the folder of a store: data.path=FOLDER")
        for path in filter(None, (self.path, self.test)):
            folder = Path(path).expanduser()
            kind = layout(folder)
            if kind == "prepared":
                held = Manifest.read(folder)[0].kind
                # Beside a foreign store it may be said of that one.
                fits = self.kind in ("auto", held) or self.test is not None
                said = f"data.kind={self.kind}: {folder} holds {held}, as its manifest says"
                require(fits, f"{said}; leave data.kind out")
            elif kind == "tars":
                stored_shape(folder, self.kind)

    def check_contents(self, task: str) -> None:
        """Open the stores and read their labels as a run does (this imports torch)."""
        from experiments.data.dataset import create

        create(self, task=task)

    def fingerprint(self) -> str:
        """Return a checksum of the manifest, or of the names and sizes of a foreign store's files.

        Hidden files (the list of positions that reading tars leaves there) are left out.
        """
        folder = Path(self.path).expanduser() if self.path else None
        if folder is None or not folder.is_dir():
            return "absent"
        if (folder / MANIFEST).is_file():
            return sha256(folder / MANIFEST)[:16]
        files = sorted(p for p in folder.iterdir() if p.is_file() and p.name[0] != ".")
        listed = "".join(f"{path.name} {path.stat().st_size}\n" for path in files)
        return hashlib.sha256(listed.encode()).hexdigest()[:16]


def first_class_empty(whose: str, lowest: int) -> str:
    """Return the warning for labels that begin at `lowest` and not at 0."""
    empty = "class 0 has" if lowest == 1 else f"classes 0 to {lowest - 1} have"
    return (
        f"{whose} smallest label is {lowest}, so {empty} no sample but a row of the model's "
        "embedding; if the labels are meant to count from 1, subtract 1 where they are stored"
    )


def layout(folder: Path) -> str:
    """Return how a folder holds latents: prepared, tars or shards (LightningDiT's)."""
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder; data.path expects the folder of a latent store")
    names = [entry.name for entry in visible_files(folder, "*")]
    if MANIFEST in names:
        return "prepared"
    if "plan.json" in names:
        raise DataError(
            f"{folder}: prepare has not finished here; run the same command again to continue it"
        )
    for found, suffix in (("tars", ".tar"), ("shards", ".safetensors")):
        if any(name.endswith(suffix) for name in names):
            return found
    listed = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    raise DataError(
        f"{folder}: no latents found; expected manifest.json (from prepare), *.tar (latent.npy and "
        f"cls) or *.safetensors (latents, labels); found {listed or 'nothing'}; from pictures, "
        f"python experiments/prepare.py {folder} OUT makes latents"
    )


def stored_shape(folder: Path, kind: str) -> tuple[str, tuple[int, int, int]]:
    """Return the kind and (C, H, W) of a foreign store from its first header."""
    if tars := visible_files(folder, "*.tar"):
        # One file after the other may be of one sample, or all of a kind may come first.
        fields: dict[str, Member] = {}
        for member in walk(tars[0]):
            fields[member.field] = member
            if member.field in LATENT:
                break
        with tars[0].open("rb") as archive:
            _, stored, _ = latent_in(archive, fields, str(tars[0]))
    else:
        with safe_open(visible_files(folder, "*.safetensors")[0], "numpy") as file:
            stored = tuple(file.get_slice("latents").get_shape()[1:])
    return moments_or_sample(stored, kind, str(folder))


def moments_or_sample(
    stored: tuple[int, ...], kind: str, where: str
) -> tuple[str, tuple[int, int, int]]:
    """Return the kind and the latent's (C, H, W) for stored rows of shape `stored`."""
    moments = kind == "moments" or (kind == "auto" and stored[:1] == (8,))
    if len(stored) != 3 or min(stored) < 1 or (moments and stored[0] % 2):
        twice = ", of moments twice the channels" if moments else ""
        said = f"{where} holds rows of {list(stored)}"
        raise DataError(f"{said}; expected [C, H, W] such as [4, 32, 32]{twice}")
    channels, height, width = stored
    return "moments" if moments else "sample", (channels // (1 + moments), height, width)
