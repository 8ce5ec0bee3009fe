"""Autoencoders in latent diffusion's own layout: Stable Diffusion's and VA-VAE's single files.

diffusers has the same network under other names. The configuration is read off the tensors' shapes,
then every tensor is renamed:

    encoder.down.i.block.j.nin_shortcut   ->  encoder.down_blocks.i.resnets.j.conv_shortcut
    decoder.up.i.block.j                  ->  decoder.up_blocks.(n-1-i).resnets.j
    *.attn_1.q (a 1x1 convolution)        ->  *.attentions.0.to_q (a linear layer)
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from experiments.data.data_options import DataError

SUFFIXES = (".pt", ".pth", ".ckpt", ".safetensors")
# Latent diffusion divides the channels of every norm into 32 groups.
_GROUPS = 32
_PREFIXES = ("encoder.", "decoder.", "quant_conv.", "post_quant_conv.")
_RENAMES = (
    (r"mid\.block_1\.", "mid_block.resnets.0."),
    (r"mid\.block_2\.", "mid_block.resnets.1."),
    (r"mid\.attn_1\.", "mid_block.attentions.0."),
    (r"\.norm_out\.", ".conv_norm_out."),
    (r"nin_shortcut", "conv_shortcut"),
    (r"encoder\.down\.(\d+)\.block\.", r"encoder.down_blocks.\1.resnets."),
    (r"encoder\.down\.(\d+)\.attn\.", r"encoder.down_blocks.\1.attentions."),
    (r"encoder\.down\.(\d+)\.downsample\.", r"encoder.down_blocks.\1.downsamplers.0."),
    (r"decoder\.up\.(\d+)\.block\.", r"decoder.up_blocks.\1.resnets."),
    (r"decoder\.up\.(\d+)\.attn\.", r"decoder.up_blocks.\1.attentions."),
    (r"decoder\.up\.(\d+)\.upsample\.", r"decoder.up_blocks.\1.upsamplers.0."),
)
_ATTENTION = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}


def load(path: Path) -> Any:
    """Return diffusers' AutoencoderKL with the weights of a single file.

    Args:
        path: .safetensors, or .pt, .pth, .ckpt that hold plain tensors.

    Raises:
        DataError: A pickle of more than tensors, or no autoencoder of this kind.
    """
    from diffusers import AutoencoderKL

    state = _state(path)
    try:
        config = _config(state)
        network: Any = AutoencoderKL(**config)
        network.load_state_dict(rename(state, len(config["block_out_channels"])))
    except (KeyError, ValueError, RuntimeError, IndexError, TypeError, AttributeError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(
            f"{path} is no autoencoder of latent diffusion ({lines[-1].strip()}); expected "
            "encoder.* and decoder.* tensors as Stable Diffusion and VA-VAE publish them"
        ) from None
    return network


def _state(path: Path) -> dict[str, Tensor]:
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
    found = found.get("state_dict", found) if isinstance(found, dict) else {}
    names = {str(k).removeprefix("first_stage_model."): v for k, v in found.items()}
    return {
        name: value
        for name, value in names.items()
        if name.startswith(_PREFIXES) and isinstance(value, Tensor)
    }


def _config(state: dict[str, Tensor]) -> dict[str, Any]:
    def levels(pattern: str) -> list[int]:
        return sorted({int(m[1]) for name in state if (m := re.match(pattern, name))})

    depth = len(levels(r"encoder\.down\.(\d+)\.block\."))
    channels = [len(state[f"encoder.down.{i}.block.0.conv1.weight"]) for i in range(depth)]
    down, up = (levels(rf"{side}\.(\d+)\.attn\.") for side in (r"encoder\.down", r"decoder\.up"))
    latent = state["decoder.conv_in.weight"].shape[1]
    return {
        "block_out_channels": channels,
        "layers_per_block": len(levels(r"encoder\.down\.0\.block\.(\d+)\.")),
        "down_block_types": [
            "AttnDownEncoderBlock2D" if i in down else "DownEncoderBlock2D" for i in range(depth)
        ],
        "up_block_types": [
            "AttnUpDecoderBlock2D" if i in up else "UpDecoderBlock2D"
            for i in reversed(range(depth))
        ],
        "latent_channels": latent,
        "norm_num_groups": min(_GROUPS, *channels),
        "use_quant_conv": "quant_conv.weight" in state,
        "use_post_quant_conv": "post_quant_conv.weight" in state,
        # VA-VAE's latents are normalised by statistics instead (latents_stats.pt).
        "scaling_factor": 0.18215 if latent == 4 else 1.0,
    }


def rename(state: dict[str, Tensor], depth: int) -> dict[str, Tensor]:
    """Return tensors under diffusers' names, whose decoder counts levels the other way round."""
    renamed = {}
    for name, value in state.items():
        new = name
        for pattern, replacement in _RENAMES:
            new = re.sub(pattern, replacement, new)
        new = re.sub(r"up_blocks\.(\d+)", lambda m: f"up_blocks.{depth - 1 - int(m[1])}", new)
        if ".attentions." in new:
            head, part, kind = new.rsplit(".", 2)
            new = f"{head}.{_ATTENTION[part]}.{kind}"
            value = value[:, :, 0, 0] if value.dim() == 4 else value
        renamed[new] = value
    return renamed
