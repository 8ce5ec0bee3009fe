"""Small feature networks, trained on a data set's images: a classifier, and an autoencoder.

A classifier's features favour whatever makes an image more typical of its class, as guidance does.
Those of the autoencoder, which is trained without labels, hold what is needed to reconstruct the
image, and are a second, independent measure. The networks of digits, mnist and fashion come with
the package (`SHIPPED`). Others are trained once per data set, on its training split, in seconds on
a CPU thread, and kept in the cache under a lock. A file's name is a hash of everything that
determines its weights. Training runs in float64 on one thread and the result is rounded to float32,
so that machines agree to far more digits than a score prints.

`python tests/tools/train_score_networks.py DATA` trains the shipped networks again.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from experiments.evaluation.images import split_batches
from experiments.options.evaluation import MetricError
from experiments.runtime.files import atomic_path
from experiments.runtime.locks import locked
from routing.errors import require

#: Raise one when its network or training changes: old files are then left alone, new ones made.
CLASSIFIER_VERSION, AUTOENCODER_VERSION = 1, 1
#: Networks that come with the package: the file's name without suffix, and the SHA-256 of the
#: weights (`checksum`), which identifies the metric in every score.
SHIPPED = {
    "digits-classifier": "d2f54a3cbc19ffc03f5129f40d7180fcb98df955d7fd8a79c45d7692398ae39a",
    "digits-autoencoder": "7e980fbb46dbfb8374ce848c57056e44527782c0ba2bcbc834a33cbb24dab1e4",
    "mnist-classifier": "114458aa38617c2a8063a6ea72bd9da725458ea4feae63857475c1aeab3f779e",
    "mnist-autoencoder": "a4511aad6098cd83bc601f71b81679f963a63f7a3c29540170fe1dc7cb90bbf2",
    "fashion-classifier": "2ae1be5545c8d138a7f6a0bd621f80f3e363fdf91fb7bf260ce92b1e61cd3586",
    "fashion-autoencoder": "f2ebe58a0ee16a3b2d3721075eed992a6f70201e6d2d03987634da147d4f3803",
}
SHIPPED_FOLDER = Path(__file__).with_name("score_networks")
# Seconds to wait for another process that trains.
_WAIT_S = 3600.0
# Pixel values up to which training takes seconds and prints nothing.
_QUICK = 10**6
# Side of the largest images of an autoencoder: wider ones need a larger network, and minutes.
_LARGEST = 64


@dataclass(frozen=True)
class _Recipe:
    """How a network is built and trained; part of its name in the cache."""

    width: int = 16
    dim: int = 64
    batch: int = 64
    lr: float = 6e-3
    weight_decay: float = 1e-2
    seed: int = 0


@dataclass(frozen=True)
class NetworkPlan:
    """How the network of a data set is built and trained."""

    data: str  # name of the data set
    kind: str  # `classifier` or `autoencoder`
    size: int  # side of the images
    settings: list[Any]  # what determines the weights besides the recipe, JSON-able
    recipe: _Recipe
    build: Callable[[], Any]  # returns the untrained network, which has `learn` and `quality`

    @property
    def identity(self) -> str:
        """Everything that determines the weights, as JSON."""
        return json.dumps([*self.settings, vars(self.recipe)], sort_keys=True)


class KeptNetwork(NamedTuple):
    """A network with its record."""

    model: Any  # the network, in evaluation mode
    # On the held-out split: the share that a classifier gets right, the share of the variance that
    # an autoencoder explains
    quality: float
    path: Path  # its file in the cache
    fresh: bool  # whether this call trained it


def checksum(model: nn.Module) -> str:
    """Return the SHA-256 of a network's weights, names included."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def load_or_make(
    folder: Path, plan: NetworkPlan, splits: Callable[[str], tuple[Any, ...]]
) -> KeptNetwork:
    """Return a network from the cache, or train and keep it while other processes wait.

    Args:
        folder: Folder of the cache.
        plan: The network.
        splits: Returns images (N, 3, H, W) uint8 and labels (N,), if any, of the split `train` or
            `test`.
    """
    digest = hashlib.sha256(plan.identity.encode()).hexdigest()[:12]
    path = folder / f"{plan.data}-{digest}.safetensors"
    cached = read_network(path, plan)
    if cached:
        return cached
    with locked(folder, wait_s=_WAIT_S):
        return read_network(path, plan) or train_network(path, plan, splits)


def load_shipped(plan: NetworkPlan) -> KeptNetwork | None:
    """Return the network of the package, or None if none fits these data and this recipe.

    Raises:
        MetricError: The file is missing, or its weights are not those of `SHIPPED`.
    """
    name = f"{plan.data}-{plan.kind}"
    path = SHIPPED_FOLDER / f"{name}.safetensors"
    if name not in SHIPPED or _metadata(path).get("identity", plan.identity) != plan.identity:
        return None
    network = read_network(path, plan)
    if network is None or checksum(network.model) != SHIPPED[name]:
        raise MetricError(
            f"{path} is missing or damaged: expected weights with SHA-256 {SHIPPED[name][:8]}; "
            "install the package again"
        )
    return network


def train_network(
    path: Path, plan: NetworkPlan, splits: Callable[[str], tuple[Any, ...]]
) -> KeptNetwork:
    """Train a network, measure it on held-out images, and write both to a safetensors file."""
    images = splits("train")
    if images[0].numel() > _QUICK:
        print(
            f"training the {plan.data} network for scores (once for this machine, about a minute)",
            file=sys.stderr,
            flush=True,
        )
    threads = torch.get_num_threads()
    # Fixed seed and one thread: sums in one order, hence the same weights everywhere.
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(plan.recipe.seed)
        torch.set_num_threads(1)
        try:
            model = plan.build().double()
            model.learn(*images)
        finally:
            torch.set_num_threads(threads)
    model = model.float().eval().requires_grad_(False)
    quality = model.quality(*splits("test"))
    with atomic_path(path) as temporary:
        metadata = {"identity": plan.identity, "accuracy": repr(quality)}
        save_file(model.state_dict(), temporary, metadata=metadata)
    return KeptNetwork(model, quality, path, fresh=True)


def read_network(path: Path, plan: NetworkPlan) -> KeptNetwork | None:
    """Return the network in a file, or None if it is absent, broken or of another plan."""
    metadata = _metadata(path)
    if metadata.get("identity") != plan.identity:
        return None
    try:
        with torch.random.fork_rng(devices=[]):
            model = plan.build()
        model.load_state_dict(load_file(path))
        quality = float(metadata["accuracy"])
    except (OSError, SafetensorError, RuntimeError, KeyError, ValueError):
        return None
    return KeptNetwork(model.eval().requires_grad_(False), quality, path, fresh=False)


def _metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a file; empty if it is absent or broken."""
    try:
        with safe_open(path, framework="pt") as handle:
            return handle.metadata() or {}
    except (OSError, SafetensorError):
        return {}


def fit(parameters: Iterable[Any], recipe: _Recipe, steps: int, losses: Iterable[Tensor]) -> None:
    """Minimise `losses`, an iterator that computes each on demand, by AdamW with one cycle."""
    optimizer = torch.optim.AdamW(parameters, recipe.lr, weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.lr, total_steps=steps)
    for loss in losses:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


# --- classifier ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe(_Recipe):
    """How the classifier is built and trained."""

    epochs: int = 16
    shift: int = 1


class SmallClassifier(nn.Module):
    """Convolutions at halved resolutions, `dim` features, a linear head.

    The side, 8 or more, is halved until 4 to 7 remain, from 16 on by the first convolution already,
    which saves most of the time.
    """

    def __init__(self, size: int, classes: int, recipe: Recipe) -> None:
        super().__init__()
        self.recipe, self.dim = recipe, recipe.dim
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

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Return features `(B, dim)` and logits `(B, classes)` of `(B, 3, H, W)` in 0..255."""
        x = images.to(self.head.weight.dtype) / 127.5 - 1
        features = self.neck(self.body(x))
        return {"features": features, "logits": self.head(F.gelu(features))}

    def learn(self, images: Tensor, labels: Tensor) -> None:
        """Train on a data set's images (N, 3, H, W) uint8, moved by up to `shift` whole pixels."""
        recipe, pad, (h, w) = self.recipe, self.recipe.shift, images.shape[-2:]

        def losses() -> Iterator[Tensor]:
            for _ in range(recipe.epochs):
                for index in torch.randperm(len(images)).split(recipe.batch):
                    y, x = (pad - torch.randint(-pad, pad + 1, (2,))).tolist()
                    # Padding repeats the border.
                    padded = F.pad(images[index].float(), [pad] * 4, mode="replicate")
                    logits = self(padded[..., y : y + h, x : x + w])["logits"]
                    yield F.cross_entropy(logits, labels[index], label_smoothing=0.05)

        matrices = [p for p in self.parameters() if p.ndim > 1]
        biases = [p for p in self.parameters() if p.ndim == 1]
        groups = [{"params": matrices}, {"params": biases, "weight_decay": 0.0}]
        fit(groups, recipe, recipe.epochs * -(-len(images) // recipe.batch), losses())

    def quality(self, images: Tensor, labels: Tensor) -> float:
        """Return the accuracy on images with these labels."""
        correct = 0
        for x, y in zip(images.split(1024), labels.split(1024), strict=True):
            correct += int((self(x)["logits"].argmax(dim=1) == y).sum())
        return correct / len(images)


# --- autoencoder ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class CodeRecipe(_Recipe):
    """How the autoencoder is built and trained."""

    steps: int = 800


class SmallAutoencoder(nn.Module):
    """Strided convolutions to a short code and back, halving a side that is even and 8 or more.

    Each number of the code has a variance near 1 over the training images: a distance between codes
    has a scale of its own, and no number outweighs the others. The code has an eighth of a square
    image's numbers at most: a code as long as a grey image would just copy the pixels.
    """

    def __init__(self, size: int, recipe: CodeRecipe) -> None:
        super().__init__()
        self.recipe = recipe
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
        unit = nn.BatchNorm1d(self.dim, affine=False)
        self.encoder = nn.Sequential(*down, nn.Flatten(), code, unit)
        back = nn.Linear(self.dim, channels * size * size)
        self.decoder = nn.Sequential(back, nn.Unflatten(1, inner), *up)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Return the codes `(B, dim)` of uint8 images `(B, 3, H, W)`."""
        return {"features": self.encoder(self.scaled(images))}

    def scaled(self, images: Tensor) -> Tensor:
        """Return uint8 images in -1..1, in the weights' precision."""
        return images.to(next(self.parameters()).dtype) / 127.5 - 1

    def error(self, images: Tensor) -> Tensor:
        """Return the squared error of every pixel of uint8 images after decoding."""
        target = self.scaled(images)
        return (self.decoder(self.encoder(target)) - target).square()

    def learn(self, images: Tensor, labels: Tensor | None = None) -> None:
        """Train on the squared error of a data set's images (N, 3, H, W) uint8."""
        recipe = self.recipe

        def losses() -> Iterator[Tensor]:
            order = torch.empty(0, dtype=torch.long)
            for _ in range(recipe.steps):
                if len(order) < recipe.batch:
                    order = torch.cat([order, torch.randperm(len(images))])
                index, order = order[: recipe.batch], order[recipe.batch :]
                yield self.error(images[index]).mean()

        fit(self.parameters(), recipe, recipe.steps, losses())

    def quality(self, images: Tensor, labels: Tensor | None = None) -> float:
        """Return the explained share of the pixels' variance."""
        parts = images.split(1024)
        mean = sum(self.scaled(part).sum(dim=0) for part in parts) / len(images)
        lost = total = 0.0
        for part in parts:
            lost += self.error(part).sum().item()
            total += (self.scaled(part) - mean).square().sum().item()
        return 1 - lost / total


# --- of a data set -------------------------------------------------------------------------------


def own_network_plan(kind: str, dataset: Any) -> NetworkPlan:
    """Return how a data set's `classifier` or `autoencoder` is built and trained."""
    # Latents and the images that they are decoded to differ in size.
    size = next(split_batches(dataset, "train", torch.arange(1)))[0].shape[-1]
    settings = [dataset.name, dataset.pixels_fingerprint, size]
    recipe: Any
    build: Callable[[], Any]
    if kind == "classifier":
        # 2 to 16 epochs: 32,000 images in total where possible.
        recipe = Recipe(epochs=max(2, min(16, 32000 // dataset.sizes["train"])))
        build = partial(SmallClassifier, size, dataset.num_classes, recipe)
        settings = [CLASSIFIER_VERSION, *settings, dataset.num_classes]
    else:
        require(
            size <= _LARGEST,
            f"the autoencoder is for images up to {_LARGEST} pixels wide, these are {size}; "
            "choose other features, such as inception-adm",
            MetricError,
        )
        recipe = CodeRecipe()
        build = partial(SmallAutoencoder, size, recipe)
        settings = [AUTOENCODER_VERSION, *settings]
    return NetworkPlan(dataset.name, kind, size, settings, recipe, build)
