"""manifest.json of a latent store: what its shards hold (no torch here)."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.data.data_options import DataError
from routing.parsing import json_of

FORMAT = "tread-latents/1"
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """What a store holds."""

    kind: str  # `moments` (mean and log variance, 2 C channels) or `sample` (C channels)
    shape: tuple[int, int, int]  # (C, H, W) of a latent
    count: int  # number of samples
    flips: bool  # whether `latents_flip` are stored
    labels: bool  # whether `labels` are stored
    classes: tuple[str, ...]  # names of classes
    # None, or the encoder and its (K captions per sample, L tokens, E channels)
    text: dict[str, Any] | None
    vae: str  # which autoencoder made it
    scale_factor: float  # multiplies `latent - shift_factor` to about unit standard deviation
    shift_factor: float  # subtracted first; 0 for Stable Diffusion's VAE
    image_size: int  # side of the pictures in pixels
    mean: tuple[float, ...]  # mean of latents per channel, before scaling
    std: tuple[float, ...]  # standard deviation of latents per channel, before scaling
    source: str  # where the pictures came from
    skipped: int  # how many could not be read
    shards: tuple[dict[str, Any], ...]  # one of {file, count, bytes, sha256} each

    def dumps(self) -> str:
        """Return the manifest as JSON."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def loads(cls, content: bytes, path: Path) -> Manifest:
        """Parse and check a manifest."""
        try:
            values = json_of(content)
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
