"""Pretrained encoders: diffusers' AutoencoderKL for pictures, CLIP or T5 for captions.

Each is a name on the hub or a folder.
Pixels are (v / 127.5) - 1 going in and round((v + 1) 127.5) coming out. Decoding runs in the type
that was asked for and ends in float32 before it is rounded, so float32 and bfloat16 differ by the
network's own error alone. Caption embeddings are (B, L, E), L = 77 for CLIP.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backbones.weights import hub_problem
from experiments.data.data_options import DataError, first_line, require
from experiments.data.dataset import Device, to_uint8
from experiments.runtime.parsing import is_number
from routing.rng import Draws

DEFAULT = "stabilityai/sd-vae-ft-ema"
_NO_DIFFUSERS = 'diffusers is not installed (pip install -e ".[data]"), so latents stay latents'
_FILES = ("config.json", "diffusion_pytorch_model.safetensors")
_SAFE = {"use_safetensors": True}  # the older .bin files are pickles
_GIVE = "give a diffusers folder (data.vae=FOLDER; prepare: --vae FOLDER)"


def why_not(name: str | None) -> str:
    """Return why an autoencoder (on the hub, a folder) cannot be used here, or nothing."""
    if not name:
        return "the store does not say which VAE made it; set data.vae=FOLDER to see pixels"
    if importlib.util.find_spec("diffusers") is None:
        return _NO_DIFFUSERS
    path = Path(name).expanduser()
    if path.is_file():
        return (
            f"{path} is a single file, and a diffusers folder is needed: make one with "
            "AutoencoderKL.from_single_file(FILE, config=FOLDER).save_pretrained(OUT)"
        )
    if path.is_dir():
        missing = [file for file in _FILES if not (path / file).is_file()]
        return f"{path} has no {missing[0]}; {_GIVE}" if missing else ""
    from huggingface_hub import try_to_load_from_cache

    try:
        if all(isinstance(try_to_load_from_cache(name, file), str) for file in _FILES):
            return ""
    except ValueError:  # the hub's, for what is no name there
        return f"{name} is neither a folder nor a name on the hub; {_GIVE}"
    return f"the weights of {name} are not on this machine; type `hf download {name}`, or {_GIVE}"


class Autoencoder:
    """Encode pictures to moments and decode latents to pictures.

    `name` is one on the hub, which is asked where `download` is set, or a folder in diffusers'
    layout.
    """

    def __init__(
        self,
        name: str,
        device: Device = "cpu",
        dtype: torch.dtype = torch.float32,
        download: bool = False,
    ) -> None:
        folder = Path(name).expanduser()
        reason = why_not(name)
        if reason and (reason == _NO_DIFFUSERS or folder.exists() or not download):
            raise DataError(reason)
        from diffusers import AutoencoderKL

        network = _pretrained(AutoencoderKL, "VAE", name, download, _GIVE, **_SAFE)
        self.network = network.to(device, dtype).eval().requires_grad_(False)
        self.device, self.dtype = torch.device(device), dtype
        config = network.config
        self.channels = int(config.latent_channels)
        self.factor = 2 ** (len(config.block_out_channels) - 1)
        scale, shift = config.scaling_factor, getattr(config, "shift_factor", None) or 0.0
        good = is_number(scale) and is_number(shift) and scale > 0
        said = f"the VAE {name} has scaling_factor={scale!r} and shift_factor={shift!r}"
        right = "numbers, the first above 0 (Stable Diffusion's has 0.18215 and null)"
        require(good, f"{said}; expected {right}")
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


def _pretrained(kind: Any, what: str, name: str, download: bool, give: str, **more: Any) -> Any:
    """Return what a class of the hub's libraries loads from a folder, or by a name on the hub."""
    folder = Path(name).expanduser()
    # The libraries retry for half a minute, and then say that the repository lacks a file.
    ask = download and not folder.is_dir()
    problem = hub_problem(name, "config.json") if ask else ""
    try:
        source = str(folder) if folder.is_dir() else name
        return kind.from_pretrained(source, local_files_only=not ask or bool(problem), **more)
    except Exception as error:
        reason = f"{problem}; it is not in the local cache" if problem else first_line(error)
        fetch = "" if folder.is_dir() else f"fetch it with `hf download {name}`, or "
        raise DataError(f"the {what} {name} cannot be loaded ({reason}); {fetch}{give}") from None


def sample_moments(moments: Tensor, draws: Draws, stream: str) -> Tensor:
    """Sample latents (B, C, H, W), m + exp(log s^2 / 2) n, from moments (B, 2 C, H, W)."""
    mean, log_variance = moments.chunk(2, 1)
    noise = draws.normal(stream, tuple(mean.shape[1:])).to(mean.device)
    # The bounds of diffusers' DiagonalGaussianDistribution.
    return mean + (log_variance.clamp(-30, 20) / 2).exp() * noise


# --- captions -------------------------------------------------------------------------------------


_KINDS = {"clip": "CLIPTextModel", "clip_text_model": "CLIPTextModel", "t5": "T5EncoderModel"}


class TextEncoder:
    """Captions to embeddings: the last hidden states, padded and cut to one length.

    `name` is a folder, or one on the hub (asked where `download` is set), of a CLIP or a T5 model
    with its tokenizer.
    """

    def __init__(self, name: str, device: Device, length: int, download: bool = False) -> None:
        if importlib.util.find_spec("transformers") is None:
            raise DataError('transformers is not installed; pip install -e ".[data]"')
        import transformers

        def load(kind: str, **more: Any) -> Any:
            give = "give the folder of a CLIP or T5 model"
            return _pretrained(
                getattr(transformers, kind), "text encoder", name, download, give, **more
            )

        family = load("AutoConfig").model_type
        said = f"{name} is a {family} model; expected a CLIP or T5 text encoder"
        require(family in _KINDS, said)
        self.tokenizer, model = load("AutoTokenizer"), load(_KINDS[family], **_SAFE)
        # CLIP has learnt so many positions; T5's are relative.
        most = getattr(model.config, "max_position_embeddings", None) or length
        reads = f"the text encoder {name} reads {most} tokens at most"
        require(length <= most, f"{reads}, not {length}")
        self.name, self.length, self.device = name, length, torch.device(device)
        self.model = model.to(self.device).eval().requires_grad_(False)
        self.width = int(self.model.config.hidden_size)

    @torch.inference_mode()
    def __call__(self, captions: Sequence[str]) -> Tensor:
        """Return (B, L, E) float32; captions beyond L tokens are cut."""
        size = {"padding": "max_length", "truncation": True, "max_length": self.length}
        tokens = self.tokenizer(list(captions), return_tensors="pt", **size).to(self.device)
        output = self.model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
        return output.last_hidden_state.float()
