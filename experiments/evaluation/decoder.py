"""From samples of a trained model to pixels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.data.dataset import create
from experiments.data.latent_options import LatentsOptions
from experiments.data.latent_space import LatentSpace
from experiments.data.registry import parse
from experiments.evaluation.trained_model import TrainedModel
from experiments.options.roles import ConfigError
from routing.errors import require

# Data options of latents that concern decoding alone, not where the latents are.
_DECODING = {"vae", "vae_dtype", "decode_batch"}


def create_decoder(loaded: TrainedModel, changes: Mapping[str, Any], device: Any) -> Any:
    """Return the data set, or for latents the latent space, that turns samples into pixels.

    Weights of latents describe how to decode them, so the latents themselves are only needed if
    `changes` has other options of the data than those of decoding.

    Raises:
        ConfigError: The samples cannot be decoded.
    """
    config = loaded.config
    options = parse({**config.composed["data"], **changes})
    described = "decoding" in loaded.info and _DECODING.issuperset(changes)
    decoder: Any
    if isinstance(options, LatentsOptions) and described:
        decoder = LatentSpace.restore(options, loaded.info, config.task, device)
    else:
        decoder = create(options, task=config.task, device=device)
    require(decoder.can_decode, decoder.cannot_decode, ConfigError)
    return decoder
