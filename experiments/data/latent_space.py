"""How latents become pixels and captions embeddings, without the latents themselves.

Weights are sampled on machines that never saw the store they were trained on, so an exported file
carries these few numbers and names.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.data.autoencoder import DEFAULT, Autoencoder, why_not
from experiments.data.data_options import DataError
from experiments.data.dataset import Batch, Dataset, Rows
from experiments.data.latents_spec import LatentsOptions
from experiments.data.text_encoder import TextEncoder
from routing.rng import Draws


@dataclass(frozen=True)
class Decoding:
    """The way from model space x to the autoencoder's latents z = x unit + shift, JSON-able."""

    shift: tuple[float, ...]  # one number per channel
    unit: tuple[float, ...]  # one number per channel
    scaled: bool = False  # whether z is still multiplied by `factor` (samples that were stored so)
    factor: float | None = None  # the autoencoder's scale factor, or None where nothing names one
    offset: float = 0.0  # its shift factor
    vae: str | None = None  # its name or folder, or None
    text_encoder: str | None = None  # name of what embeds captions, or None

    @classmethod
    def read(cls, values: Mapping[str, Any], channels: int) -> Decoding:
        """Return what an exported file says, checked."""
        try:
            lists = {key: tuple(float(v) for v in values[key]) for key in ("shift", "unit")}
            found = cls(**{**values, **lists})
            numbers = [*found.shift, *found.unit, found.offset]
            numbers += [] if found.factor is None else [found.factor]
            good = (
                len(found.shift) == len(found.unit) == channels
                and all(math.isfinite(v) for v in numbers)
                and found.factor != 0
                and isinstance(found.scaled, bool)
                and all(isinstance(v, str | None) for v in (found.vae, found.text_encoder))
            )
        except (TypeError, ValueError, KeyError, AttributeError):
            good = False
        if not good:
            raise DataError(
                "the weights do not say how their latents become pixels (damaged metadata); "
                "give the store they were trained on: data.path=FOLDER"
            )
        return found


class LatentSpace(Dataset):
    """Latents that are not here: they can be shown and asked for, not read.

    Of the options, those of a store are not looked at.
    """

    decoding: Decoding

    def __init__(
        self, options: LatentsOptions, task: str = "class", device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(options, task, device)
        # The store or the weights say, not the options.
        self.num_classes, self.text = 0, None
        self.options = options
        self.sizes = {}
        self._codec: Autoencoder | None = None
        self._encoder: TextEncoder | None = None

    @classmethod
    def restore(
        cls,
        options: LatentsOptions,
        info: Mapping[str, Any],
        task: str = "class",
        device: torch.device | str = "cpu",
    ) -> LatentSpace:
        """Return the space of weights whose data set described itself by `info`."""
        self = cls(options, task, device)
        try:
            channels, height, width = (int(n) for n in info["shape"])
            self.shape = channels, height, width
            self.num_classes = int(info["num_classes"])
            self.class_names = tuple(str(name) for name in info["class_names"])
            self.text = (int(info["text"][0]), int(info["text"][1])) if info["text"] else None
            self.fingerprint = str(info["fingerprint"])
            said = dict(info["decoding"])
        except (TypeError, ValueError, KeyError, IndexError):
            said = {}
        self.decoding = Decoding.read(said, getattr(self, "shape", (0,))[0])
        return self

    def describe(self) -> dict[str, Any]:
        """Return how these latents are decoded, as `restore` reads it."""
        return {"decoding": {**dataclasses.asdict(self.decoding), "vae": self.vae}}

    def batch(
        self, index: Tensor, draws: Draws | None, split: str = "train", rows: Rows | None = None
    ) -> Batch:
        """Refuse: there are no samples."""
        raise DataError("the latents themselves are not here; give their store: data.path=FOLDER")

    @property
    def vae(self) -> str | None:
        """Name or folder of the autoencoder that turns these latents into pixels."""
        if self.options.vae != "auto":
            return self.options.vae
        return self.decoding.vae or (DEFAULT if self.shape[0] == 4 else None)

    @property
    def cannot_decode(self) -> str:
        """Why latents cannot be shown as pixels here; empty if they can."""
        return "" if self._codec is not None else why_not(self.vae)

    def to_pixels(self, x: Tensor) -> Tensor:
        """Decode model space (B, C, H, W) into uint8 RGB (B, 3, 8 H, 8 W) with the VAE."""
        how = self.decoding
        shift, unit = (
            torch.tensor(v, device=self.device).view(-1, 1, 1) for v in (how.shift, how.unit)
        )
        z = x.to(self.device).float() * unit + shift
        if how.scaled:
            if how.factor is None:
                raise DataError("scaled latents need data.scale_factor to be decoded")
            z = z / how.factor + how.offset
        codec = self._decoder()
        return torch.cat([codec.decode(part) for part in z.split(self.options.decode_batch)])

    def _decoder(self) -> Autoencoder:
        if self._codec is None:
            if self.cannot_decode:
                raise DataError(f"no pixels: {self.cannot_decode}")
            dtype = getattr(torch, self.options.vae_dtype)
            self._codec = Autoencoder(str(self.vae), self.device, dtype)
            if self._codec.channels != self.shape[0]:
                channels, self._codec = self._codec.channels, None
                raise DataError(
                    f"the VAE {self.vae} has {channels} channels and the latents {self.shape[0]}; "
                    "set data.vae to the one that made them"
                )
        return self._codec

    def encode_text(self, captions: Sequence[str]) -> Tensor:
        """Embed captions with the text encoder that the store was prepared with."""
        if self.text is None or self.decoding.text_encoder is None:
            return super().encode_text(captions)
        if self._encoder is None:
            self._encoder = TextEncoder(self.decoding.text_encoder, self.device, self.text[0])
        return self._encoder(captions)
