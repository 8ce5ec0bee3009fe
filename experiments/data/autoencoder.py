"""The autoencoder between pictures and latents: diffusers' AutoencoderKL.

It is a name on the hub, a folder in diffusers' layout, or a single file of latent diffusion.
Pixels are (v / 127.5) - 1 going in and round((v + 1) 127.5) coming out. Decoding runs in the type
that was asked for and ends in float32 before it is rounded, so float32 and bfloat16 differ by the
network's own error alone.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.data import ldm_weights
from experiments.data.data_options import DataError
from experiments.data.dataset import to_uint8
from routing.rng import Draws

DEFAULT = "stabilityai/sd-vae-ft-ema"
_FILES = ("config.json", "diffusion_pytorch_model.safetensors")


def why_not(name: str | None) -> str:
    """Return why an autoencoder (on the hub, a folder, a file) cannot be used here, or nothing."""
    if not name:
        return "the store does not say which VAE made it; set data.vae=FOLDER to see pixels"
    if importlib.util.find_spec("diffusers") is None:
        return 'diffusers is not installed (pip install -e ".[data]"), so latents stay latents'
    path = Path(name).expanduser()
    if path.is_file() and path.suffix not in ldm_weights.SUFFIXES:
        return f"{path} is no autoencoder: expected one of {' '.join(ldm_weights.SUFFIXES)}"
    if path.is_dir():
        for file in _FILES:
            if not (path / file).is_file():
                return f"{path} has no {file}; data.vae expects a diffusers folder"
    if path.exists():
        return ""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = [try_to_load_from_cache(name, file) for file in _FILES]
    except HFValidationError:
        return f"{name} is neither a folder nor a name on the hub; set data.vae=FOLDER"
    if all(isinstance(path, str) for path in found):
        return ""
    return (
        f"the weights of {name} are not on this machine: fetch them with `hf download {name}`, or "
        "give a folder (data.vae=FOLDER; prepare: --vae FOLDER)"
    )


class Autoencoder:
    """Encode pictures to moments and decode latents to pictures.

    `name` is one on the hub, which is asked where `download` is set, a folder in diffusers' layout,
    or a file as `ldm_weights` reads it.
    """

    def __init__(
        self,
        name: str,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        download: bool = False,
    ) -> None:
        folder = Path(name).expanduser()
        reason = why_not(name)
        if reason and not (download and not folder.exists()):
            raise DataError(reason)
        if folder.is_file():
            network = ldm_weights.load(folder)
        else:
            network = _pretrained(str(folder) if folder.is_dir() else name, dtype, download)
        if network.dtype != dtype:
            network = network.to(dtype=dtype)
        self.network = network.to(device).eval().requires_grad_(False)
        self.device, self.dtype = torch.device(device), dtype
        config = network.config
        self.channels = int(config.latent_channels)
        self.factor = 2 ** (len(config.block_out_channels) - 1)
        scale, shift = config.scaling_factor, getattr(config, "shift_factor", None) or 0.0
        numbers = all(isinstance(x, int | float) and math.isfinite(x) for x in (scale, shift))
        if not numbers or scale <= 0:
            raise DataError(
                f"the VAE {name} has scaling_factor={scale!r} and shift_factor={shift!r}; expected "
                "numbers, the first above 0 (Stable Diffusion's has 0.18215 and null)"
            )
        self.scale_factor, self.shift_factor = float(scale), float(shift)

    @torch.inference_mode()
    def encode(self, images: Tensor) -> Tensor:
        """Return mean and log variance (B, 2 C, H / f, W / f) of uint8 images (B, 3, H, W)."""
        x = images.to(self.device).float() / 127.5 - 1
        return self.network.encode(x.to(self.dtype)).latent_dist.parameters.float()

    @torch.inference_mode()
    def decode(self, latents: Tensor) -> Tensor:
        """Return pictures (B, 3, H f, W f) uint8 of latents (B, C, H, W) that are not scaled."""
        x = self.network.decode(latents.to(self.device, self.dtype)).sample.float()
        return to_uint8((x + 1) * 127.5)


def _pretrained(name: str, dtype: torch.dtype, download: bool) -> Any:
    from diffusers import AutoencoderKL

    try:
        # Weights in safetensors only: the older .bin files are pickles.
        return AutoencoderKL.from_pretrained(
            name, use_safetensors=True, local_files_only=not download, torch_dtype=dtype
        )
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(f"the VAE {name} cannot be loaded: {lines[0]}") from None


def sample_moments(moments: Tensor, draws: Draws, stream: str) -> Tensor:
    """Sample latents (B, C, H, W), m + exp(log s^2 / 2) n, from moments (B, 2 C, H, W)."""
    mean, log_variance = moments.chunk(2, 1)
    noise = draws.normal(stream, tuple(mean.shape[1:])).to(mean.device)
    # The bounds of diffusers' DiagonalGaussianDistribution.
    return mean + (log_variance.clamp(-30, 20) / 2).exp() * noise
