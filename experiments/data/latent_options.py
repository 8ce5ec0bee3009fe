"""Options of data=latents (no torch here)."""

from __future__ import annotations

import functools
import hashlib
import os
import pkgutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from experiments.data.data_options import DataOptions, ShapeError, require
from experiments.data.latent_manifest import MANIFEST, Manifest, Shape, store_layout, stored_shape
from experiments.runtime.digest import File, sampled
from experiments.runtime.files import sha256, visible_files
from routing.options import OMITTED_AT_DEFAULT

#: The autoencoder of 4-channel latents whose store names none.
DEFAULT_VAE = "stabilityai/sd-vae-ft-ema"
#: Files of an autoencoder in a folder, in diffusers' layout.
VAE_FILES = ("config.json", "diffusion_pytorch_model.safetensors")

Side = Annotated[int, Ge(1)]


@dataclass(frozen=True)
class LatentsOptions(DataOptions):
    """Precomputed VAE latents: ImageNet-256 (4x32x32), ImageNet-512 (4x64x64), COCO.

    From `python experiments/prepare.py`, or LightningDiT's shards.
    """

    name: str = "latents"
    path: Annotated[str | None, "Folder of the store. Required: data.path=/data/imagenet256."] = (
        None
    )
    shape: Annotated[
        tuple[Side, Side, Side] | None,
        OMITTED_AT_DEFAULT,
        "Expected shape of the latents, such as [32,16,16]; others are refused. null: any.",
    ] = None
    test: Annotated[
        str | None, "A second store for the held-out split (ImageNet's validation set), or null."
    ] = None
    held_out: Annotated[
        int,
        Ge(0),
        "Without a second store: number of samples, selected by a fixed permutation, that are "
        "never trained on.",
    ] = 0
    flip: Annotated[
        Literal["auto", "mirror", "none"],
        "auto: stored latents of mirrored images if there are any, else none; mirror: flip the "
        "latent itself, an approximation.",
    ] = "auto"
    scale: Annotated[
        Literal["factor", "std"],
        "factor: multiply by the VAE's scale factor, as in the paper; std: normalise every channel "
        "to mean 0 and standard deviation sigma_data.",
    ] = "factor"
    scale_factor: Annotated[
        Annotated[float, Gt(0)] | None,
        "The VAE's scale factor if the store does not name it (Stable Diffusion: 0.18215).",
    ] = None
    scaled: Annotated[
        Literal["auto", "yes", "no"],
        "Whether third-party latents were already multiplied by it; auto: samples were, 8-channel "
        "moments were not.",
    ] = "auto"
    kind: Annotated[
        Literal["auto", "sample", "moments"],
        "Contents of third-party latents; auto: 8 channels are moments (mean and log variance of "
        "4), any other number samples.",
    ] = "auto"
    num_classes: Annotated[
        Annotated[int, Ge(0)] | None,
        "Number of classes if the store names none; null: highest label plus one.",
    ] = None
    vae: Annotated[
        str,
        "AutoencoderKL that decodes to pixels: a name on the hub or a diffusers folder; auto: the "
        "one that the store was made with.",
    ] = "auto"
    vae_dtype: Annotated[
        Literal["float32", "bfloat16"],
        "bfloat16 decodes twice as fast on a GPU, within about two grey levels.",
    ] = "float32"
    decode_batch: Annotated[int, Ge(1), "Latents decoded at a time; 16 fit beside an XL model."] = (
        16
    )
    verify: Annotated[
        bool,
        "Check the SHA-256 of every shard at the start (reads the whole store); sizes are always "
        "checked.",
    ] = False

    location_keys = ("path",)
    # Assumed while there is no store: ImageNet-256 under a VAE that divides the side by 8, and 77
    # tokens of CLIP for captioned data.
    sample_shape = (4, 32, 32)
    class_count = 1000
    caption_shape = (77, 768)
    dataset = "experiments.data.latents:Latents"

    def check_consistency(self) -> None:
        """Refuse two held-out splits."""
        require(
            self.held_out == 0 or self.test is None,
            f"data.held_out={self.held_out}: expected 0 with data.test={self.test}, which already "
            "is the held-out split",
        )

    @property
    def _folder(self) -> Path:
        return Path(str(self.path)).expanduser()

    @functools.cached_property
    def _headers(self) -> tuple[Manifest | None, Shape | None]:
        """The manifest of a prepared store, and the shape of the latents of any store.

        Read once for each options object. Both are None for a missing or damaged store: opening
        the data set reports what is wrong.
        """
        with suppress(Exception):
            if (self._folder / MANIFEST).exists():
                manifest = Manifest.read(self._folder)[0]
                return manifest, manifest.shape
            return None, stored_shape(self._folder, self.kind)[1]
        return None, None

    def actual_shape(self) -> Shape:
        """Return the shape in the store's headers; without a store `shape`, or ImageNet-256's.

        Raises:
            ShapeError: The shape of the latents differs from `data.shape`.
        """
        _, stored = self._headers
        expected = self.shape or stored or self.sample_shape
        if stored and stored != expected:
            raise ShapeError(
                f"data.shape={list(expected)}: the latents in {self.path} are {_by(stored)}; "
                f"expected latents of {_by(expected)} in data.path (VA-VAE f16d32 makes 32x16x16 "
                "of 256x256 pixels)"
            )
        return expected

    def describe(self) -> dict[str, Any]:
        """Return the description in the store's headers, or that of ImageNet-256 without a store.

        Raises:
            ShapeError: The shape of the latents differs from `data.shape`.
        """
        description = super().describe()
        manifest, _ = self._headers
        if manifest:
            description["num_classes"] = len(manifest.classes)
            description["text"] = list(manifest.text.shape)[1:] if manifest.text else None
        if self.num_classes:
            description["num_classes"] = self.num_classes
        return description

    def check_files(self) -> None:
        """Raise `DataError` for stores that are missing or have a damaged manifest."""
        require(bool(self.path), "data=latents needs the folder of a store: data.path=FOLDER")
        for path in (self.path, self.test):
            if not path:
                continue
            folder = Path(path).expanduser()
            layout = store_layout(folder)
            if layout == "prepared":
                stored_kind = Manifest.read(folder)[0].kind
                # With two stores, `kind` may refer to the other one.
                require(
                    self.kind in ("auto", stored_kind) or self.test is not None,
                    f"data.kind={self.kind}: expected {stored_kind}, as the manifest of {folder} "
                    "says; leave data.kind out",
                )

    def check_contents(self, task: str) -> None:
        """Open the stores and read their labels, as a run does (imports torch)."""
        pkgutil.resolve_name(self.dataset)(self, task)

    def vae_of(self, stored_vae: str | None, channels: int) -> str | None:
        """Return name or folder of the autoencoder of a store's latents, or None if unknown."""
        if self.vae != "auto":
            return self.vae
        return stored_vae or (DEFAULT_VAE if channels == 4 else None)

    def undecodable_reason(self) -> str:
        """Return why latents cannot be decoded here; empty if they can (imports torch)."""
        manifest, _ = self._headers
        vae = self.vae_of(manifest.vae if manifest else None, self.actual_shape()[0])
        return str(pkgutil.resolve_name("experiments.data.encoders:unavailable_reason")(vae))

    def fingerprint(self) -> str:
        """Return a checksum of the manifest, or of file names and sizes of a third-party store."""
        return _fingerprint_of(self._folder) if self.path else "absent"

    def path_fingerprints(self) -> dict[str, str]:
        """Return fingerprints of the second store, and of a VAE in a folder."""
        fingerprints = {}
        if self.test is not None:
            fingerprints["test"] = _fingerprint_of(Path(self.test).expanduser())
        vae = Path(self.vae).expanduser()
        if self.vae != "auto":
            fingerprints["vae"] = os.path.normpath(self.vae)  # a name on the hub stays as it is
        if vae.is_dir():
            files = [vae / name for name in VAE_FILES if (vae / name).is_file()]
            fingerprints["vae"] = hashlib.sha256(b"".join(map(sampled, files))).hexdigest()[:16]
        return fingerprints

    def content_files(self) -> list[File]:
        """Return the shards of both stores, with what describes them."""
        files = []
        for key in ("path", "test"):
            folder = getattr(self, key)
            for file in visible_files(Path(folder).expanduser(), "*") if folder else ():
                if file.name == MANIFEST or file.suffix in (".safetensors", ".pt"):
                    files.append(File(f"{key}/{file.name}", str(file), sampled))
        return files


def _fingerprint_of(folder: Path) -> str:
    """Return a checksum of a store's manifest, or of the file names and sizes of another layout."""
    if not folder.is_dir():
        return "absent"
    if (folder / MANIFEST).is_file():
        return sha256(folder / MANIFEST)[:16]
    digest = hashlib.sha256()
    for path in visible_files(folder, "*"):
        if path.is_file():
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()[:16]


def _by(shape: Shape) -> str:
    """Format a shape as 4x32x32."""
    return "x".join(map(str, shape))
