"""Weights files: one reader per format; nothing but tensors is ever unpickled.

Our own files are safetensors with the model's arguments in the metadata.
"""

import argparse
import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from backbones.parsing import check_file, json_of
from backbones.sizes import BackboneError
from routing.errors import require

FORMAT = "tread-suite/1"
FILE = "model.safetensors"
_LFS_POINTER = b"version https://git-lfs."


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file with the umask's permissions, as for any other new file.

    safetensors itself writes a private file (0600), which other users cannot read.
    """
    existed = path.exists()
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(on_cpu, path, metadata)
        path.chmod(mode)
    except BaseException:
        if not existed:
            path.unlink(missing_ok=True)
        raise


def write(path: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write weights with a model's `config`, the arguments of `create`, in the metadata."""
    save_tensors(path, tensors, {"format": FORMAT, "model": json.dumps(config)})


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the weights of a file that `write` or a run wrote, and the arguments of `create`.

    Raises:
        BackboneError: It is not a whole safetensors file, or does not say what model it holds.
    """
    tensors, metadata = read_safetensors(path)
    require(
        metadata.get("format") == FORMAT and "model" in metadata,
        f"{path} does not say what model it holds; weights of other projects load through "
        "backbones.import_weights.load",
        BackboneError,
    )
    try:
        return tensors, dict(json_of(metadata["model"]))
    except (TypeError, ValueError) as error:
        raise BackboneError(f"the metadata of {path} is damaged: {error}") from error


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a safetensors file and its metadata.

    Raises:
        BackboneError: It cannot be read or is not a whole safetensors file.
    """
    _check_readable(path)
    tensors = {}
    try:
        with safe_open(path, framework="pt") as handle:
            metadata = handle.metadata() or {}
            for name in handle.keys():  # noqa: SIM118
                tensors[name] = handle.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise BackboneError(f"{path} is not a whole safetensors file: {error}") from error
    return tensors, metadata


def read_torch(path: Path) -> Mapping[str, Any]:
    """Return what a .pt or .pth file holds: a state dict, or a checkpoint around several.

    Raises:
        BackboneError: It cannot be read, or holds more than tensors and plain values.
    """
    _check_readable(path)
    try:
        # DiT's training script saves its command line beside the weights: a plain record.
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:
        # On a damaged file, torch's restricted unpickler raises errors of many types.
        raise BackboneError(
            f"{path} is damaged or holds more than tensors, which is refused because it can run "
            "code; if you trust it, save its state dict alone with torch.save"
        ) from None
    require(
        isinstance(content, Mapping),
        f"{path} holds no state dict: expected names with a tensor each",
        BackboneError,
    )
    return content


def _check_readable(path: Path) -> None:
    """Raise `BackboneError` for a file that cannot be opened, or that Git LFS has not fetched."""
    try:
        check_file(path)
        with path.open("rb") as file:
            beginning = file.read(len(_LFS_POINTER))
    except OSError as error:
        raise BackboneError(f"{path} cannot be read ({error.strerror or error})") from error
    require(
        beginning != _LFS_POINTER,
        f"{path} is a Git LFS pointer and not the weights; fetch them with git lfs pull",
        BackboneError,
    )
