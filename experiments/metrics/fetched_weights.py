"""Weights that are fetched once, checked, and loaded without unpickling anything."""

from __future__ import annotations

import hashlib
import urllib.error
import urllib.request
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from experiments.metrics.metric_names import MetricError
from experiments.runtime.files import atomic_path, sha256


def fetch(
    url: str, target: Path, digest_start: str, what: str, option: str, timeout: float = 20.0
) -> Path:
    """Return `target`, downloaded from `url` if it is not there.

    Args:
        url: Where the file is published.
        target: Where it is kept.
        digest_start: Start of its SHA-256; anything else is refused and not kept.
        what: What it is, for the message.
        option: Config key that names a local file instead.
        timeout: Seconds to wait for an answer.

    Raises:
        MetricError: It cannot be had; the message says what to fetch by hand and where to name it.
    """
    if target.exists():
        if not sha256(target).startswith(digest_start):
            raise MetricError(
                f"{target} are not {what} (the checksum differs); delete it and run again"
            )
        return target
    try:
        with (
            urllib.request.urlopen(url, timeout=timeout) as answer,
            atomic_path(target) as temporary,
        ):
            digest = hashlib.sha256()
            with temporary.open("wb") as handle:
                while piece := answer.read(1 << 20):
                    digest.update(piece)
                    handle.write(piece)
            if not digest.hexdigest().startswith(digest_start):
                raise OSError("its checksum differs")
    except (OSError, urllib.error.URLError) as error:
        reason = getattr(error, "reason", error)
        raise MetricError(
            f"{what} are not at {target} and could not be downloaded ({reason}): "
            f"fetch {url} on a machine with the internet and pass {option}=FILE"
        ) from None
    return target


def load_state(path: str | Path, what: str, option: str) -> dict[str, Tensor]:
    """Return the tensors in a `.safetensors` or PyTorch file; nothing in it is executed.

    Raises:
        MetricError: No such file, or none that holds tensors only.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise MetricError(f"{option}={path}: no such file; expected {what}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise MetricError(f"{option}={path} is not readable as {what} ({line[:120]})") from None
