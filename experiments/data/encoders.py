"""Pretrained encoders: diffusers' AutoencoderKL for pictures, CLIP or T5 for captions.

Each is a name on the hub or a folder; an autoencoder may be a single file of latent diffusion too.
Pixels are (v / 127.5) - 1 going in and round((v + 1) 127.5) coming out. Decoding runs in the type
that was asked for and ends in float32 before it is rounded, so float32 and bfloat16 differ by the
network's own error alone. Caption embeddings are (B, L, E), L = 77 for CLIP.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from backbones.hub import hub_problem
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
    """Return why an autoencoder (on the hub, a folder, a file) cannot be used here, or nothing."""
    if not name:
        return "the store does not say which VAE made it; set data.vae=FOLDER to see pixels"
    if importlib.util.find_spec("diffusers") is None:
        return _NO_DIFFUSERS
    path = Path(name).expanduser()
    if path.is_file():
        wrong = f"{path} is no autoencoder: expected one of {' '.join(SUFFIXES)}"
        return "" if path.suffix in SUFFIXES else wrong
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

    `name` is one on the hub, which is asked where `download` is set, a folder in diffusers' layout,
    or a single file of latent diffusion (Stable Diffusion, VA-VAE).
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
        if folder.is_file():
            network: Any = load_single_file(folder)
        else:
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


# --- single files of latent diffusion ------------------------------------------------------------
#
# diffusers has the same network under other names: the configuration is read off the tensors'
# shapes, and diffusers' own converter renames them, but for the attention beside the blocks of a
# level, which VA-VAE has at its lowest one.


SUFFIXES = (".pt", ".pth", ".ckpt", ".safetensors")
# Latent diffusion divides the channels of every norm into 32 groups.
_GROUPS = 32
_PREFIXES = ("encoder.", "decoder.", "quant_conv.", "post_quant_conv.")


def load_single_file(path: Path) -> Any:
    """Return diffusers' AutoencoderKL with the weights of a single file of plain tensors.

    Raises:
        DataError: A pickle of more than tensors, or no autoencoder of this kind.
    """
    from diffusers import AutoencoderKL

    try:
        if path.suffix == ".safetensors":
            found: Any = load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:
        raise DataError(
            f"{path} is damaged or holds more than tensors, which is refused because it can run "
            "code; if you trust it, save its state_dict alone with torch.save"
        ) from None
    try:
        named = {
            name.removeprefix("first_stage_model."): tensor
            for name, tensor in found.get("state_dict", found).items()
        }
        state = {name: tensor for name, tensor in named.items() if name.startswith(_PREFIXES)}
        config = _config(state)
        network: Any = AutoencoderKL(**config)
        network.load_state_dict(_renamed(state, config))
    except (KeyError, ValueError, RuntimeError, IndexError, TypeError, AttributeError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(
            f"{path} is no autoencoder of latent diffusion ({lines[-1].strip()}); expected "
            "encoder.* and decoder.* tensors as Stable Diffusion and VA-VAE publish them"
        ) from None
    return network


def _config(state: dict[str, Tensor]) -> dict[str, Any]:
    def levels(pattern: str) -> list[int]:
        return sorted({int(m[1]) for name in state if (m := re.match(pattern, name))})

    depth = len(levels(r"encoder\.down\.(\d+)\.block\."))
    channels = [len(state[f"encoder.down.{i}.block.0.conv1.weight"]) for i in range(depth)]
    down, up = (levels(rf"{side}\.(\d+)\.attn\.") for side in (r"encoder\.down", r"decoder\.up"))
    latent = state["decoder.conv_in.weight"].shape[1]
    attend = {True: "Attn", False: ""}
    return {
        "block_out_channels": channels,
        "layers_per_block": len(levels(r"encoder\.down\.0\.block\.(\d+)\.")),
        "down_block_types": [f"{attend[i in down]}DownEncoderBlock2D" for i in range(depth)],
        "up_block_types": [f"{attend[i in up]}UpDecoderBlock2D" for i in reversed(range(depth))],
        "latent_channels": latent,
        "norm_num_groups": min(_GROUPS, *channels),
        "use_quant_conv": "quant_conv.weight" in state,
        "use_post_quant_conv": "post_quant_conv.weight" in state,
        # VA-VAE's latents are normalised by statistics instead (latents_stats.pt).
        "scaling_factor": 0.18215 if latent == 4 else 1.0,
    }


def _renamed(state: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Return tensors under diffusers' names, whose decoder counts levels the other way round."""
    from diffusers.loaders import single_file_utils as names

    made = names.convert_ldm_vae_checkpoint(state, config)
    depth = len(config["block_out_channels"])
    for level in range(depth):
        for side, new in (("down", level), ("up", depth - 1 - level)):
            old = f"{side}.{level}.attn"
            keys = [name for name in state if f".{old}." in name]
            turned = {"old": old, "new": f"{side}_blocks.{new}.attentions"}
            names.update_vae_attentions_ldm_to_diffusers(keys, made, state, turned)
    return {name: tensor for name, tensor in made.items() if ".attn." not in name}


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
