"""A small classifier of the embedded data: features, and a check on what was drawn.

It is trained once per data set, on the training split only, in seconds on a CPU (`kept_network`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.metrics.kept_network import KeptNetwork, announce, load_or_make, training

#: Raise it when the network or its training changes: old files are then left alone and a new one is
# made.
VERSION = 1

# Images that are trained on without a word.
_QUICK = 10000


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


def recipe_for(count: int) -> Recipe:
    """Return the recipe for `count` training images: 2 to 16 epochs, 32,000 images if possible."""
    return Recipe(epochs=max(2, min(16, 32000 // count)))


class SmallClassifier(nn.Module):
    """Convolutions at halved resolutions, `dim` features, a linear head.

    The side, 8 or more, is halved until 4 to 7 remain, from 16 on by the first convolution already,
    which saves most of the time.
    """

    provides = ("features", "logits")

    def __init__(self, size: int, classes: int, recipe: Recipe | None = None) -> None:
        super().__init__()
        recipe = recipe or Recipe()
        self.dim = recipe.dim
        stride = 2 if size >= 16 else 1
        stem = nn.Conv2d(3, recipe.width, 3, padding=1, stride=stride)
        layers: list[nn.Module] = [stem, nn.GELU()]
        channels, size = recipe.width, -(-size // stride)
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


def train(
    images: Tensor, labels: Tensor, classes: int, recipe: Recipe | None = None
) -> SmallClassifier:
    """Train a classifier on images (N, 3, H, W) uint8; the same input gives the same weights."""
    recipe = recipe or Recipe()
    with training(recipe.seed):
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


def load_or_train(
    name: str,
    fingerprint: str,
    size: int,
    classes: int,
    splits: Callable[[str], tuple[Tensor, Tensor]],
    cache: str | os.PathLike[str],
    recipe: Recipe | None = None,
) -> KeptNetwork:
    """Return the data set's classifier, from the cache or trained now.

    `splits` returns images (N, 3, H, W) uint8 and labels (N,) of the split `train` or `test`.
    """
    recipe = recipe or Recipe()
    settings = [VERSION, name, fingerprint, size, classes, vars(recipe)]

    def make() -> tuple[nn.Module, float]:
        images, labels = splits("train")
        if len(images) > _QUICK:
            announce(f"{name}-classifier")
        model = train(images, labels, classes, recipe)
        return model, accuracy(model, *splits("test"))

    folder = Path(cache) / "classifiers"
    return load_or_make(
        folder, name, settings, lambda: SmallClassifier(size, classes, recipe), make
    )
