"""A small classifier of the embedded data: features, and a check on what was drawn.

It is trained once per data set, on the training split only, in seconds on a CPU, and kept in the
cache under a name made of the data's fingerprint and of everything that decides the weights.
Training runs in float64 on one thread and the result is rounded to float32, so that machines agree
to far more digits than a score prints.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from experiments.runtime.files import atomic_path

#: Raise it when the network or its training changes: old files are then left alone and a new one is
# made.
VERSION = 1


@dataclass(frozen=True)
class Recipe:
    """How the classifier is built and trained; part of its name in the cache."""

    width: int = 16
    dim: int = 64
    epochs: int = 16
    batch: int = 64
    lr: float = 6e-3
    weight_decay: float = 1e-2
    shift: int = 1
    seed: int = 0


class SmallClassifier(nn.Module):
    """Convolutions at full and halved resolutions, `dim` features, a linear head.

    Args:
        size: Side of the images, 8 or more; the resolution is halved until 4 remain.
        classes: Number of classes.
        recipe: Width and number of features.
    """

    def __init__(self, size: int, classes: int, recipe: Recipe | None = None) -> None:
        super().__init__()
        recipe = recipe or Recipe()
        layers: list[nn.Module] = [nn.Conv2d(3, recipe.width, 3, padding=1), nn.GELU()]
        channels = recipe.width
        while size >= 8:
            wider = min(2 * channels, 4 * recipe.width)
            layers += [nn.Conv2d(channels, wider, 3, padding=1), nn.GELU(), nn.AvgPool2d(2)]
            channels, size = wider, size // 2
        self.body = nn.Sequential(*layers, nn.Flatten())
        # No nonlinearity on the features: a dead one would make every covariance singular.
        self.neck = nn.Linear(channels * size * size, recipe.dim)
        self.head = nn.Linear(recipe.dim, classes)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return features `(B, dim)` and logits `(B, classes)` of uint8 images `(B, 3, H, W)`."""
        x = images.to(self.head.weight.dtype) / 127.5 - 1
        features = self.neck(self.body(x))
        return features, self.head(F.gelu(features))


@contextlib.contextmanager
def _one_thread(seed: int) -> Iterator[None]:
    """Fixed seed and one thread: sums in one order, hence the same weights everywhere."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def train(
    images: Tensor, labels: Tensor, classes: int, recipe: Recipe | None = None
) -> SmallClassifier:
    """Train a classifier; the same input gives the same weights.

    Args:
        images: Training images, uint8 with shape `(N, 3, H, W)`.
        labels: Their classes, with shape `(N,)`.
        classes: Number of classes.
        recipe: Network and optimisation.
    """
    recipe = recipe or Recipe()
    with _one_thread(recipe.seed), torch.enable_grad():
        model = SmallClassifier(images.shape[-1], classes, recipe).double()
        decay: dict[str, Any] = {"params": [p for p in model.parameters() if p.ndim > 1]}
        rest: dict[str, Any] = {
            "params": [p for p in model.parameters() if p.ndim == 1],
            "weight_decay": 0.0,
        }
        optimizer = torch.optim.AdamW([decay, rest], lr=recipe.lr, weight_decay=recipe.weight_decay)
        steps = recipe.epochs * -(-len(images) // recipe.batch)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.lr, total_steps=steps)
        for _ in range(recipe.epochs):
            for index in torch.randperm(len(images)).split(recipe.batch):
                offset = torch.randint(-recipe.shift, recipe.shift + 1, (2,)).tolist()
                shifted = _shift(images[index], *offset)
                loss = F.cross_entropy(model(shifted)[1], labels[index], label_smoothing=0.05)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    return model.float().eval().requires_grad_(False)


def _shift(images: Tensor, down: int, right: int) -> Tensor:
    """Move the images by whole pixels; what comes in repeats the border."""
    pad = max(abs(down), abs(right))
    if not pad:
        return images
    h, w = images.shape[-2:]
    padded = F.pad(images.float(), (pad, pad, pad, pad), mode="replicate").to(images.dtype)
    return padded[..., pad - down : pad - down + h, pad - right : pad - right + w]


@torch.no_grad()
def accuracy(model: SmallClassifier, images: Tensor, labels: Tensor, batch: int = 1024) -> float:
    """Return the share of `images` that `model` takes for `labels`."""
    pieces = zip(images.split(batch), labels.split(batch), strict=True)
    right = sum(int((model(x)[1].argmax(dim=1) == y).sum()) for x, y in pieces)
    return right / len(images)


@dataclass(frozen=True)
class TrainedClassifier:
    """A classifier with its record.

    Attributes:
        model: The network, in evaluation mode.
        accuracy: Share of the held-out split that it gets right.
        checksum: SHA-256 over its weights.
        path: Its file in the cache.
        fresh: Whether this call trained it.
    """

    model: SmallClassifier
    accuracy: float
    checksum: str
    path: Path
    fresh: bool


def checksum(model: nn.Module) -> str:
    """Return the SHA-256 of a network's weights, names included."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def load_or_train(
    name: str,
    fingerprint: str,
    size: int,
    classes: int,
    splits: Callable[[str], tuple[Tensor, Tensor]],
    cache: str | os.PathLike[str],
    recipe: Recipe | None = None,
) -> TrainedClassifier:
    """Return the data set's classifier, from the cache or trained now.

    Args:
        name: Name of the data set.
        fingerprint: Identity of its content.
        size: Side of its images.
        classes: Number of its classes.
        splits: Returns images (uint8, `(N, 3, H, W)`) and labels of the split `train` or `test`.
        cache: Folder of the cache.
        recipe: Network and optimisation.
    """
    recipe = recipe or Recipe()
    identity = json.dumps([VERSION, name, fingerprint, size, classes, vars(recipe)], sort_keys=True)
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]
    path = Path(cache) / "classifiers" / f"{name}-{key}.safetensors"
    found = _load(path, SmallClassifier(size, classes, recipe), identity)
    if found is not None:
        return found
    model = train(*splits("train"), classes, recipe)
    share = accuracy(model, *splits("test"))
    with atomic_path(path) as temporary:
        metadata = {"identity": identity, "accuracy": repr(share)}
        save_file(model.state_dict(), temporary, metadata=metadata)
    return TrainedClassifier(model, share, checksum(model), path, fresh=True)


def _load(path: Path, model: SmallClassifier, identity: str) -> TrainedClassifier | None:
    """Return what the file holds, or None if it is not there, broken or of something else."""
    try:
        with safe_open(path, framework="pt") as handle:
            metadata = handle.metadata() or {}
        if metadata.get("identity") != identity:
            return None
        model.load_state_dict(load_file(path))
        share = float(metadata["accuracy"])
    except (OSError, SafetensorError, RuntimeError, KeyError, ValueError):
        return None
    model.eval().requires_grad_(False)
    return TrainedClassifier(model, share, checksum(model), path, fresh=False)
