"""Options of data=latents, and what their headers say (no torch here)."""

from __future__ import annotations

import hashlib
import re
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from experiments.data.data_options import DataError, DataOptions, ShapeError, one_of, require
from experiments.data.store_manifest import MANIFEST, Manifest
from routing.parsing import bytes_of

IMAGES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".parquet", ".arrow"}


@dataclass(frozen=True)
class LatentsOptions(DataOptions):
    """Precomputed VAE latents: ImageNet-256 (4x32x32), ImageNet-512 (4x64x64), COCO.

    Args:
        name: Always `latents`.
        sigma_data: Standard deviation that the objective assumes.
        path: Folder of the store: from `experiments/prepare.py`, WebDataset tars, or
            LightningDiT's shards.
        shape: (C, H, W) that the latents must have, or None for any.
        test: A second store for the held-out split, or None.
        held_out: Number of samples taken out of `path` for the held-out split where `test` is None.
        flip: `auto`: stored flips where there are any; `mirror`: mirror the latent itself; `none`.
        scale: `factor`: times the VAE's scale factor; `std`: every channel to mean 0 and
            `sigma_data`.
        scale_factor: Overrides the VAE's scale factor where a store names none (SD: 0.18215).
        scaled: `auto`: what the store says; `yes` or `no`: whether foreign latents are already
            scaled.
        kind: `auto`, or what foreign latents hold: `sample` or `moments` (mean and log variance).
        num_classes: Number of classes where a store names none; None: highest label plus one.
        vae: diffusers AutoencoderKL for pixels, a name or a folder; `auto`: the store's own.
        vae_dtype: `float32` or `bfloat16` for decoding.
        decode_batch: Latents decoded at a time.
        verify: Check every shard's SHA-256 at the start (reads the whole store).
    """

    name: str = "latents"
    path: str | None = None
    shape: Sequence[int] | None = None
    test: str | None = None
    held_out: int = 0
    flip: str = "auto"
    scale: str = "factor"
    scale_factor: float | None = None
    scaled: str = "auto"
    kind: str = "auto"
    num_classes: int | None = None
    vae: str = "auto"
    vae_dtype: str = "float32"
    decode_batch: int = 16
    verify: bool = False

    # Where there is no store yet: ImageNet-256 under a VAE that divides the side by 8; 77 tokens
    # of CLIP for captioned sets.
    sample_shape = (4, 32, 32)
    class_count = 1000
    caption_shape = (77, 768)
    dataset = "experiments.data.latents.Latents"
    evaluation = "latents"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.shape is None
            or (len(self.shape) == 3 and all(type(n) is int and n > 0 for n in self.shape)),
            f"data.shape={self.shape}: expected null or three sizes such as data.shape=[32,16,16]",
        )
        one_of("data.flip", self.flip, ("auto", "mirror", "none"))
        one_of("data.scale", self.scale, ("factor", "std"))
        one_of("data.kind", self.kind, ("auto", "sample", "moments"))
        one_of("data.scaled", self.scaled, ("auto", "yes", "no"))
        one_of("data.vae_dtype", self.vae_dtype, ("float32", "bfloat16"))
        require(
            self.held_out >= 0,
            f"data.held_out={self.held_out}: must be 0 or a number of samples; try "
            "data.held_out=5000",
        )
        require(
            self.decode_batch >= 1,
            f"data.decode_batch={self.decode_batch}: must be at least 1; try data.decode_batch=16",
        )
        require(
            self.scale_factor is None or self.scale_factor > 0,
            f"data.scale_factor={self.scale_factor}: must be positive; SD's VAE has "
            "data.scale_factor=0.18215",
        )
        require(
            self.num_classes is None or self.num_classes >= 0,
            f"data.num_classes={self.num_classes}: must be 0 or more; ImageNet has "
            "data.num_classes=1000",
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
        known = super().describe()
        folder = Path(str(self.path)).expanduser()
        manifest = _read_manifest(folder)
        found = list(manifest.shape) if manifest else _stored_shape(folder, self.kind)
        known["shape"] = wanted = list(self.shape or found or known["shape"])
        if found and found != wanted:
            raise ShapeError(
                f"data.shape={wanted}: the latents in {self.path} are {_times(found)}, and a "
                "model of their size would be another one at another cost; give data.path "
                f"latents of {_times(wanted)} (VA-VAE f16d32 makes 32x16x16 of 256x256 pixels)"
            )
        if manifest:
            known["num_classes"] = len(manifest.classes)
            known["text"] = list(manifest.text["shape"])[1:] if manifest.text else None
        if self.num_classes is not None:
            known["num_classes"] = self.num_classes
        return known

    def check(self) -> None:
        """Refuse stores that are not there, or whose manifest is damaged."""
        require(bool(self.path), "data=latents needs the folder of a store: data.path=FOLDER")
        for path in filter(None, (self.path, self.test)):
            folder = Path(path).expanduser()
            if layout(folder) == "prepared":
                Manifest.loads(bytes_of(folder / MANIFEST), folder / MANIFEST)

    def fingerprint(self) -> str:
        """Return a checksum of the manifest, or of the names and sizes of a foreign store's files.

        Hidden files (the list of positions that reading tars leaves there) are left out.
        """
        folder = Path(self.path).expanduser() if self.path else None
        if folder is None or not folder.is_dir():
            return "absent"
        if (folder / MANIFEST).is_file():
            return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()[:16]
        files = sorted(p for p in folder.iterdir() if p.is_file() and p.name[0] != ".")
        listed = "".join(f"{path.name} {path.stat().st_size}\n" for path in files)
        return hashlib.sha256(listed.encode()).hexdigest()[:16]


def layout(folder: Path) -> str:
    """Return how a folder holds latents: prepared, tars or shards (LightningDiT's)."""
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder; data.path expects the folder of a latent store")
    names = sorted(entry.name for entry in folder.iterdir())
    if MANIFEST in names:
        return "prepared"
    if "plan.json" in names:
        raise DataError(
            f"{folder}: prepare has not finished here; run the same command again to continue it"
        )
    if any(name.endswith(".tar") for name in names):
        return "tars"
    if any(name.endswith(".safetensors") for name in names):
        return "shards"
    raise DataError(f"{folder}: {_describe(folder, names)}")


def _describe(folder: Path, names: list[str]) -> str:
    suffixes = {Path(name).suffix.lower() for name in names}
    below = {p.suffix.lower() for p in list(folder.glob("*/*"))[:64]}
    pack = (
        "WebDataset tars as latent.npy and cls, or run python experiments/prepare.py on the "
        "pictures"
    )
    if "data.mdb" in names:
        return f"this is an LMDB, which is not read; write its records to {pack}"
    if (suffixes | below) & IMAGES:
        return f"this holds pictures, not latents; run python experiments/prepare.py {folder} OUT"
    if suffixes & {".npy", ".pt", ".pth", ".pkl"}:
        return f"loose .npy or .pt files are not read; pack them into {pack}"
    listed = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return (
        "no latents found; expected manifest.json (from prepare), *.tar (latent.npy and cls) or "
        f"*.safetensors (latents, labels); found {listed or 'nothing'}"
    )


def _times(shape: list[int]) -> str:
    return "x".join(map(str, shape))


def _read_manifest(folder: Path) -> Manifest | None:
    try:
        return Manifest.loads(bytes_of(folder / MANIFEST), folder / MANIFEST)
    except (OSError, DataError):
        # Opening the data set for real names what is wrong with it.
        return None


def _stored_shape(folder: Path, kind: str) -> list[int] | None:
    """Return (C, H, W) from the first header of a foreign store, or None where there is none."""
    try:
        files = sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".tar"))
        read = _shard_shape if files[0].suffix == ".safetensors" else _tar_shape
        stored = read(files[0])
    except Exception:
        # Nothing there, or damaged: opening the data set for real names what is wrong with it.
        return None
    if len(stored) != 3 or not all(0 < side < 2**31 for side in stored):
        return None
    moments = kind == "moments" or (kind == "auto" and stored[0] == 8)
    return [stored[0] // 2 if moments else stored[0], *stored[1:]]


def _shard_shape(path: Path) -> list[int]:
    with safe_open(path, "numpy") as file:
        return file.get_slice("latents").get_shape()[1:]


def _tar_shape(path: Path) -> list[int]:
    with tarfile.open(path, "r:") as archive:
        for info in archive:
            if info.name.endswith((".latent.npy", ".latent")) and info.isreg():
                with path.open("rb") as file:
                    file.seek(info.offset_data)
                    found = re.search(rb"'shape': \(([\d, ]+)\)", file.read(512))
                return [int(n) for n in found[1].split(b",") if n.strip()] if found else []
    return []
