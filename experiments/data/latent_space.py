"""The decoding of latents without their store: how they become images, and captions embeddings.

Exported weights carry the numbers and names of `Decoding`, so that they can be sampled on machines
without the store that they were trained on.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backbones.validation import validate
from experiments.data.data_options import DataError, require
from experiments.data.dataset import Batch, Dataset, Device
from experiments.data.encoders import Autoencoder, TextEncoder, unavailable_reason
from experiments.data.latent_options import LatentsOptions
from routing.rng import Draws

# Options that change the images of a split while the store stays the same.
_IMAGE_OPTIONS = ("held_out", "kind", "scaled", "scale_factor", "vae", "vae_dtype")


@dataclass(frozen=True)
class Decoding:
    """The map from model space x to the autoencoder's latents z = x unit + shift."""

    shift: tuple[float, ...]  # one number per channel
    unit: tuple[float, ...]  # one number per channel
    scaled: bool = False  # whether z is still multiplied by `factor` (scaled samples were stored)
    factor: float | None = None  # the autoencoder's scale factor, or None if unknown
    offset: float = 0.0  # its shift factor
    vae: str | None = None  # its name or folder, or None
    text_encoder: str | None = None  # name of the encoder of captions, or None

    def check_consistency(self) -> None:
        """Refuse a scale factor of 0, and shift and unit of different lengths."""
        require(
            self.factor != 0 and len(self.shift) == len(self.unit), "numbers that decode nothing"
        )


class LatentSpace(Dataset):
    """Latents without their store: they can be decoded and conditioned on, but not read.

    Options that concern the store are ignored.
    """

    options: LatentsOptions
    decoding: Decoding

    def _open(self) -> None:
        super()._open()
        # Set by the store or the weights.
        self.num_classes, self.text = 0, None

    @classmethod
    def restore(
        cls,
        options: LatentsOptions,
        info: Mapping[str, Any],
        task: str = "class",
        device: Device = "cpu",
    ) -> LatentSpace:
        """Return the latent space of weights, from the description `info` of their data set."""
        self = cls(options, task, device)
        try:
            channels, height, width = map(int, info["shape"])
            self.shape = channels, height, width
            self.num_classes, self.fingerprint = int(info["num_classes"]), str(info["fingerprint"])
            self.class_names = tuple(map(str, info["class_names"]))
            self.text = (int(info["text"][0]), int(info["text"][1])) if info["text"] else None
            self.decoding = validate(Decoding, info["decoding"], "decoding.")
            require(len(self.decoding.shift) == channels, "another number of channels")
        except (TypeError, ValueError, KeyError, IndexError, OverflowError):
            raise DataError(
                "the metadata of the weights do not describe how to decode their latents; pass the "
                "store that they were trained on: data.path=FOLDER"
            ) from None
        return self

    def describe(self) -> dict[str, Any]:
        """Return how these latents are decoded, as `restore` reads it."""
        return {"decoding": {**dataclasses.asdict(self.decoding), "vae": self.vae}}

    def batch(self, index: Tensor, draws: Draws | None = None, split: str = "train") -> Batch:
        """Raise `DataError`: there are no samples."""
        raise DataError("the weights come without their latents; pass the store: data.path=FOLDER")

    @property
    def vae(self) -> str | None:
        """Name or folder of the autoencoder that decodes these latents."""
        return self.options.vae_of(self.decoding.vae, self.shape[0])

    @property
    def pixels_fingerprint(self) -> str:
        """The store's fingerprint, extended by options that change decoding or the split."""
        changed = {}
        for key in _IMAGE_OPTIONS:
            value = getattr(self.options, key)
            if value != getattr(LatentsOptions, key):
                changed[key] = value
        if not changed:
            return self.fingerprint
        return f"{self.fingerprint}-{hashlib.sha256(repr(changed).encode()).hexdigest()[:8]}"

    @property
    def cannot_decode(self) -> str:
        """Why latents cannot be decoded here; empty if they can."""
        return unavailable_reason(self.vae)

    def to_pixels(self, x: Tensor) -> Tensor:
        """Decode model space (B, C, H, W) to uint8 RGB (B, 3, 8 H, 8 W) with the VAE."""
        decoding = self.decoding
        shift = torch.tensor(decoding.shift, device=self.device).view(-1, 1, 1)
        unit = torch.tensor(decoding.unit, device=self.device).view(-1, 1, 1)
        z = x.to(self.device).float() * unit + shift
        if decoding.scaled:
            if decoding.factor is None:
                raise DataError("scaled latents need data.scale_factor to be decoded")
            z = z / decoding.factor + decoding.offset
        images = [self._autoencoder.decode(part) for part in z.split(self.options.decode_batch)]
        return torch.cat(images)

    @functools.cached_property
    def _autoencoder(self) -> Autoencoder:
        require(not self.cannot_decode, f"no pixels: {self.cannot_decode}")
        dtype = getattr(torch, self.options.vae_dtype)
        autoencoder = Autoencoder(str(self.vae), self.device, dtype)
        require(
            autoencoder.channels == self.shape[0],
            f"the VAE {self.vae} has {autoencoder.channels} channels and the latents "
            f"{self.shape[0]}; set data.vae to the one that made them",
        )
        return autoencoder

    @functools.cached_property
    def _text_encoder(self) -> TextEncoder:
        assert self.text and self.decoding.text_encoder
        return TextEncoder(self.decoding.text_encoder, self.device, self.text[0])

    def encode_text(self, captions: Sequence[str]) -> Tensor:
        """Embed captions with the text encoder that the store was prepared with."""
        if self.text is None or self.decoding.text_encoder is None:
            return super().encode_text(captions)
        return self._text_encoder(captions)
