"""A small autoencoder of a data set's images: features that saw no label.

A classifier's features favour whatever makes an image more typical of its class, as guidance does.
These hold what is needed to draw the image again, and tell a second, independent story. Trained
once per data set on its training images, in about half a minute of one CPU core (`kept_network`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from experiments.metrics.kept_network import KeptNetwork, announce, load_or_make, training

#: Raise it when the network or its training changes.
VERSION = 1


@dataclass(frozen=True)
class CodeRecipe:
    """How the autoencoder is built and trained; part of its name in the cache."""

    width: int = 16
    dim: int = 64
    steps: int = 800
    batch: int = 64
    lr: float = 6e-3
    weight_decay: float = 1e-2
    seed: int = 0


class SmallAutoencoder(nn.Module):
    """Strided convolutions to a short code and back, halving a side that is even and 8 or more.

    Each number of the code has a variance near 1 over the training images: a distance between codes
    has a scale of its own, and no number outweighs the others. The code has an eighth of a square
    image's numbers at most: as long as a grey image it would be the pixels again.
    """

    provides = ("features",)

    def __init__(self, size: int, recipe: CodeRecipe | None = None) -> None:
        super().__init__()
        recipe = recipe or CodeRecipe()
        self.dim = min(recipe.dim, size * size // 2)
        down: list[nn.Module] = []
        up: list[nn.Module] = []
        channels, wider = 3, recipe.width
        while size >= 8 and size % 2 == 0:
            down += [nn.Conv2d(channels, wider, 3, 2, 1), nn.GELU()]
            up = [nn.GELU(), nn.ConvTranspose2d(wider, channels, 2, 2), *up]
            channels, wider, size = wider, min(2 * wider, 4 * recipe.width), size // 2
        inner = (channels, size, size)
        code = nn.Linear(channels * size * size, self.dim)
        self.encoder = nn.Sequential(
            *down, nn.Flatten(), code, nn.BatchNorm1d(self.dim, affine=False)
        )
        back = nn.Linear(self.dim, channels * size * size)
        self.decoder = nn.Sequential(back, nn.Unflatten(1, inner), *up)

    def forward(self, images: Tensor) -> tuple[Tensor]:
        """Return the codes `(B, dim)` of uint8 images `(B, 3, H, W)`."""
        return (self.encoder(self.scaled(images)),)

    def scaled(self, images: Tensor) -> Tensor:
        """Return uint8 images in -1..1, in the weights' precision."""
        return images.to(next(self.parameters()).dtype) / 127.5 - 1


def train(images: Tensor, recipe: CodeRecipe | None = None) -> SmallAutoencoder:
    """Train on the squared error of images (N, 3, H, W) uint8; the same input, the same weights."""
    recipe = recipe or CodeRecipe()
    with training(recipe.seed):
        model = SmallAutoencoder(images.shape[-1], recipe).double()
        decay = recipe.weight_decay
        optimizer = torch.optim.AdamW(model.parameters(), recipe.lr, weight_decay=decay)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, recipe.lr, total_steps=recipe.steps
        )
        order = torch.empty(0, dtype=torch.long)
        for _ in range(recipe.steps):
            if len(order) < recipe.batch:
                order = torch.cat([order, torch.randperm(len(images))])
            index, order = order[: recipe.batch], order[recipe.batch :]
            target = model.scaled(images[index])
            loss = (model.decoder(model.encoder(target)) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.float().eval().requires_grad_(False)


@torch.no_grad()
def explained(model: SmallAutoencoder, images: Tensor) -> float:
    """Return the share of the pixels' variance over `images` that is there again after decoding."""
    parts = images.split(1024)
    mean = sum(model.scaled(part).sum(dim=0) for part in parts) / len(images)
    lost = total = 0.0
    for part in parts:
        target = model.scaled(part)
        lost += (model.decoder(model.encoder(target)) - target).square().sum().item()
        total += (target - mean).square().sum().item()
    return 1 - lost / total


def load_or_train(
    name: str,
    fingerprint: str,
    size: int,
    images: Callable[[str], Tensor],
    cache: str | os.PathLike[str],
    recipe: CodeRecipe | None = None,
) -> KeptNetwork:
    """Return the data set's autoencoder, from the cache or trained now.

    `images` returns those of the split `train` or `test`, uint8 (N, 3, H, W).
    """
    recipe = recipe or CodeRecipe()
    settings = [VERSION, name, fingerprint, size, vars(recipe)]

    def make() -> tuple[nn.Module, float]:
        if size >= 16:
            announce(f"autoencoder of {name}")
        model = train(images("train"), recipe)
        return model, explained(model, images("test"))

    folder = Path(cache) / "autoencoders"
    return load_or_make(folder, name, settings, lambda: SmallAutoencoder(size, recipe), make)
