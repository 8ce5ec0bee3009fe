"""Pretrained encoders: diffusers' AutoencoderKL for images, CLIP or T5 for captions.

Each is given by its name on the hub or a folder. The autoencoder maps pixel values v from
(v / 127.5) - 1, and back to round((v + 1) 127.5). Decoding runs in the requested type and converts
to float32 before rounding, so float32 and bfloat16 differ only by the network's own error. Caption
embeddings are (B, L, E), with L = 77 for CLIP.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backbones.parsing import is_number
from backbones.weights import hub_problem
from experiments.data.data_options import DataError, first_line, require
from experiments.data.dataset import Device, to_uint8
from experiments.data.latent_options import VAE_FILES
from routing.rng import Draws

_NO_DIFFUSERS = 'diffusers, which decodes latents, is not installed (pip install -e ".[data]")'
_SAFE = {"use_safetensors": True}  # older .bin files are pickles
_ADVICE = "pass a diffusers folder (data.vae=FOLDER; prepare: --vae FOLDER)"


def unavailable_reason(name: str | None) -> str:
    """Return why an autoencoder cannot be used here; empty if it can."""
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
        missing = [file for file in VAE_FILES if not (path / file).is_file()]
        return f"{path} has no {missing[0]}; {_ADVICE}" if missing else ""
    from huggingface_hub import try_to_load_from_cache

    try:
        if all(isinstance(try_to_load_from_cache(name, file), str) for file in VAE_FILES):
            return ""
    except ValueError:  # not a valid name on the hub
        return f"{name} is neither a folder nor a name on the hub; {_ADVICE}"
    return f"the weights of {name} are not on this machine; type `hf download {name}`, or {_ADVICE}"


class Autoencoder:
    """Encodes images to moments and decodes latents to images.

    Args:
        name: A name on the hub, or a folder in diffusers' layout.
        device: Where it runs.
        dtype: Type of its weights.
        download: Whether to download it from the hub if it is not in the local cache.
    """

    def __init__(
        self,
        name: str,
        device: Device = "cpu",
        dtype: torch.dtype = torch.float32,
        download: bool = False,
    ) -> None:
        folder = Path(name).expanduser()
        reason = unavailable_reason(name)
        if reason and (reason == _NO_DIFFUSERS or folder.exists() or not download):
            raise DataError(reason)
        from diffusers import AutoencoderKL

        network = _pretrained(AutoencoderKL, "VAE", name, download, _ADVICE, **_SAFE)
        self.network = network.to(device, dtype).eval().requires_grad_(False)
        self.device, self.dtype = torch.device(device), dtype
        config = network.config
        self.channels = int(config.latent_channels)
        self.factor = 2 ** (len(config.block_out_channels) - 1)
        scale, shift = config.scaling_factor, getattr(config, "shift_factor", None) or 0.0
        require(
            is_number(scale) and is_number(shift) and scale > 0,
            f"the VAE {name} has scaling_factor={scale!r} and shift_factor={shift!r}; expected "
            "numbers, the first above 0 (Stable Diffusion's has 0.18215 and null)",
        )
        self.scale_factor, self.shift_factor = float(scale), float(shift)

    @torch.inference_mode()
    def encode(self, images: Tensor) -> Tensor:
        """Return mean and log variance (B, 2 C, H / f, W / f) of uint8 images (B, 3, H, W)."""
        x = images.to(self.device).float() / 127.5 - 1
        return self.network.encode(x.to(self.dtype)).latent_dist.parameters.float()

    @torch.inference_mode()
    def decode(self, latents: Tensor) -> Tensor:
        """Return images (B, 3, H f, W f) uint8 of unscaled latents (B, C, H, W)."""
        x = self.network.decode(latents.to(self.device, self.dtype)).sample.float()
        return to_uint8((x + 1) * 127.5)


def _pretrained(
    model_class: Any, description: str, name: str, download: bool, advice: str, **options: Any
) -> Any:
    """Load a model of the hub's libraries from a folder, or by its name on the hub."""
    folder = Path(name).expanduser()
    use_hub = download and not folder.is_dir()
    # Without a connection the libraries retry for half a minute and then report a missing file.
    problem = hub_problem(name, "config.json") if use_hub else ""
    try:
        source = str(folder) if folder.is_dir() else name
        local = not use_hub or bool(problem)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the libraries about each other
            return model_class.from_pretrained(source, local_files_only=local, **options)
    except Exception as error:
        reason = f"{problem}; it is not in the local cache" if problem else first_line(error)
        fetch = "" if folder.is_dir() else f"fetch it with `hf download {name}`, or "
        raise DataError(
            f"the {description} {name} cannot be loaded ({reason}); {fetch}{advice}"
        ) from None


def sample_moments(moments: Tensor, draws: Draws, stream: str) -> Tensor:
    """Sample latents (B, C, H, W), m + exp(log s^2 / 2) n, from moments (B, 2 C, H, W)."""
    mean, log_variance = moments.chunk(2, 1)
    noise = draws.normal(stream, tuple(mean.shape[1:])).to(mean.device)
    # The bounds of diffusers' DiagonalGaussianDistribution.
    return mean + (log_variance.clamp(-30, 20) / 2).exp() * noise


# --- captions -------------------------------------------------------------------------------------


_KINDS = {"clip": "CLIPTextModel", "clip_text_model": "CLIPTextModel", "t5": "T5EncoderModel"}


class TextEncoder:
    """Embeds captions: the last hidden states, padded and truncated to one length.

    Args:
        name: A folder or a name on the hub of a CLIP or T5 model with its tokenizer.
        device: Where it runs.
        length: Tokens per caption.
        download: Whether to download it from the hub if it is not in the local cache.
    """

    def __init__(self, name: str, device: Device, length: int, download: bool = False) -> None:
        if importlib.util.find_spec("transformers") is None:
            raise DataError('transformers is not installed; pip install -e ".[data]"')
        import transformers

        def load(class_name: str, **options: Any) -> Any:
            advice = "pass the folder of a CLIP or T5 model"
            model_class = getattr(transformers, class_name)
            return _pretrained(model_class, "text encoder", name, download, advice, **options)

        family = load("AutoConfig").model_type
        require(family in _KINDS, f"{name} is a {family} model; expected a CLIP or T5 text encoder")
        self.tokenizer, model = load("AutoTokenizer"), load(_KINDS[family], **_SAFE)
        # CLIP has learned embeddings of this many positions; T5's positions are relative.
        max_length = getattr(model.config, "max_position_embeddings", None) or length
        require(
            length <= max_length,
            f"the text encoder {name} reads {max_length} tokens at most, not {length}",
        )
        self.name, self.length, self.device = name, length, torch.device(device)
        self.model = model.to(self.device).eval().requires_grad_(False)
        self.width = int(self.model.config.hidden_size)

    @torch.inference_mode()
    def __call__(self, captions: Sequence[str]) -> Tensor:
        """Return (B, L, E) float32; captions are truncated to L tokens."""
        size = {"padding": "max_length", "truncation": True, "max_length": self.length}
        tokens = self.tokenizer(list(captions), return_tensors="pt", **size).to(self.device)
        output = self.model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
        return output.last_hidden_state.float()
