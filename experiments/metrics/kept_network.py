"""Small networks that scores need: trained once on a CPU thread, kept in the cache under a lock.

A file's name is made of everything that decides its weights. Training runs in float64 on one thread
and the result is rounded to float32, so that machines agree to far more digits than a score prints.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from experiments.runtime.files import atomic_path
from experiments.runtime.locks import locked

# Seconds to wait for another process that trains.
_WAIT_S = 3600.0


@dataclass(frozen=True)
class KeptNetwork:
    """A network with its record."""

    model: Any  # the network, in evaluation mode
    # On the held-out split: the share that a classifier gets right, the share of the variance that
    # an autoencoder explains
    quality: float
    checksum: str  # SHA-256 over its weights
    path: Path  # its file in the cache
    fresh: bool  # whether this call trained it


def checksum(model: nn.Module) -> str:
    """Return the SHA-256 of a network's weights, names included."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


@contextlib.contextmanager
def training(seed: int) -> Iterator[None]:
    """Fixed seed and one thread: sums in one order, hence the same weights everywhere."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def announce(name: str) -> None:
    """Say on stderr why the next minute is spent on training a network."""
    print(
        f"training the {name} that scores need, once for this machine; up to minutes on a CPU",
        file=sys.stderr,
        flush=True,
    )


def load_or_make(
    folder: Path,
    name: str,
    settings: list[Any],
    build: Callable[[], nn.Module],
    make: Callable[[], tuple[nn.Module, float]],
) -> KeptNetwork:
    """Return a network from the cache, or train and keep it while other processes wait.

    Args:
        folder: Of the cache, for networks of this kind.
        name: Start of the file's name.
        settings: Everything that decides the weights, as JSON holds it.
        build: Returns a network of the same shape, to load into.
        make: Trains one; returns it and how good it is.
    """
    identity = json.dumps(settings, sort_keys=True)
    path = folder / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}.safetensors"
    found = _load(path, build, identity)
    if found is not None:
        return found
    with locked(folder, wait_s=_WAIT_S):
        found = _load(path, build, identity)
        if found is not None:
            return found
        model, quality = make()
        with atomic_path(path) as temporary:
            metadata = {"identity": identity, "accuracy": repr(quality)}
            save_file(model.state_dict(), temporary, metadata=metadata)
    return KeptNetwork(model, quality, checksum(model), path, fresh=True)


def _load(path: Path, build: Callable[[], nn.Module], identity: str) -> KeptNetwork | None:
    """Return what the file holds, or None if it is not there, broken or of something else."""
    try:
        with safe_open(path, framework="pt") as handle:
            metadata = handle.metadata() or {}
        if metadata.get("identity") != identity:
            return None
        with torch.random.fork_rng(devices=[]):
            model = build()
        model.load_state_dict(load_file(path))
        quality = float(metadata["accuracy"])
    except (OSError, SafetensorError, RuntimeError, KeyError, ValueError):
        return None
    model.eval().requires_grad_(False)
    return KeptNetwork(model, quality, checksum(model), path, fresh=False)
