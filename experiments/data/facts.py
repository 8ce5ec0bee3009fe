"""What is known of a data set from its options alone, without reading it (no torch here).

It is enough to name a run, to count its parameters and FLOPs and to check it before it is
submitted, also on a machine that does not hold the data. A test holds it against the data sets
themselves.
"""

from __future__ import annotations

import hashlib
import re
import struct
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.data.data_options import DataOptions, LatentsOptions, ShapeError, parse
from routing.plain import json_of

# (C, H, W), classes, (L, E) of captions.
_EMBEDDED = {
    "digits": ([1, 8, 8], 10, None),
    "scenes": ([3, 32, 32], 30, [32, 64]),
}
# ImageNet-256 under a VAE that divides the side by 8; 77 CLIP tokens for captioned sets.
_LATENTS = ([4, 32, 32], 1000, [77, 768])


def facts(options: DataOptions | Mapping[str, Any]) -> dict[str, Any]:
    """Return shape, number of classes and caption shape as `build.describe_data` names them.

    Args:
        options: Of any data set; a latent store that is not there yet has `data.shape`, or counts
            as ImageNet-256.

    Raises:
        ShapeError: The latents are of another shape than `data.shape`.
    """
    chosen = parse(options)
    shape, classes, text = _EMBEDDED.get(chosen.name, _LATENTS)
    if isinstance(chosen, LatentsOptions):
        manifest = _manifest(chosen)
        found = list(manifest["shape"]) if manifest else _peek(chosen)
        wanted = list(chosen.shape or found or shape)
        if found and found != wanted:
            raise ShapeError(
                f"data.shape={wanted}: the latents in {chosen.path} are {_times(found)}, and a "
                "model of their size would be another one at another cost; give data.path "
                f"latents of {_times(wanted)} (VA-VAE f16d32 makes 32x16x16 of 256x256 pixels)"
            )
        shape = wanted
        if manifest:
            classes = len(manifest["classes"])
            text = list(manifest["text"]["shape"])[1:] if manifest.get("text") else None
        classes = chosen.num_classes if chosen.num_classes is not None else classes
    return {"name": chosen.name, "shape": shape, "num_classes": classes, "text": text}


def _times(shape: list[int]) -> str:
    return "x".join(map(str, shape))


def _manifest(options: LatentsOptions) -> dict[str, Any] | None:
    try:
        found = json_of((Path(str(options.path)).expanduser() / "manifest.json").read_bytes())
        text = found.get("text")
        good = _sides(found["shape"]) and isinstance(found["classes"], list)
        return found if good and (not text or _sides(text["shape"])) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        # Opening the data set for real names what is wrong with it.
        return None


def _sides(shape: object) -> bool:
    if not isinstance(shape, list) or len(shape) != 3:
        return False
    return all(type(side) is int and 0 < side < 2**31 for side in shape)


def _peek(options: LatentsOptions) -> list[int] | None:
    """Return (C, H, W) from the first header of a foreign store, or None where there is none."""
    folder = Path(str(options.path)).expanduser()
    stored = None
    try:
        for path in sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".tar")):
            stored = _shard_shape(path) if path.suffix == ".safetensors" else _tar_shape(path)
            break
    except (
        OSError, ValueError, KeyError, TypeError, AttributeError, EOFError,
        OverflowError, MemoryError, tarfile.TarError, struct.error,
    ):  # fmt: skip
        # Opening the data set for real names what is wrong with it.
        return None
    if stored is None or not _sides(stored):
        return None
    moments = options.kind == "moments" or (options.kind == "auto" and stored[0] == 8)
    return [stored[0] // 2 if moments else stored[0], *stored[1:]]


def _shard_shape(path: Path) -> list[int]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return [int(n) for n in json_of(file.read(min(length, 1 << 20)))["latents"]["shape"][1:]]


def _tar_shape(path: Path) -> list[int] | None:
    with tarfile.open(path, "r:") as archive:
        for info in archive:
            content = (
                archive.extractfile(info)
                if info.name.endswith((".latent.npy", ".latent"))
                else None
            )
            if content is not None:
                found = re.search(rb"'shape': \(([\d, ]+)\)", content.read(512))
                return [int(n) for n in found[1].split(b",") if n.strip()] if found else None
    return None


def fingerprint(options: DataOptions | Mapping[str, Any]) -> str:
    """Return what changes when the data change: part of a run's identity.

    Embedded data sets are functions of their options, which the identity holds already. A latent
    store is its manifest's checksum; a foreign one the names and sizes of its files, hidden ones
    (the list of positions that reading tars leaves there) aside.
    """
    chosen = parse(options)
    if not isinstance(chosen, LatentsOptions) or not chosen.path:
        return "embedded" if chosen.name in _EMBEDDED else "absent"
    folder = Path(chosen.path).expanduser()
    digest = hashlib.sha256()
    manifest = folder / "manifest.json"
    if manifest.is_file():
        digest.update(manifest.read_bytes())
    elif folder.is_dir():
        for path in sorted(p for p in folder.iterdir() if p.is_file() and p.name[0] != "."):
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    else:
        return "absent"
    return digest.hexdigest()[:16]
