"""What a metric sees of an image: a network's features, chosen by name.

Every extractor takes uint8 images of any size and does its own resizing, so that two scores with
the same features name went through the same pre-processing.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.data import probe
from experiments.metrics.collect import Features, main_first
from experiments.metrics.eval_options import FEATURES, EvalOptions, MetricError, check_known
from experiments.metrics.images import labelled_images, split_images
from experiments.metrics.pretrained import DinoFeatures, InceptionFeatures
from experiments.metrics.small_networks import (
    AUTOENCODER_VERSION,
    CLASSIFIER_VERSION,
    CodeRecipe,
    KeptNetwork,
    SmallAutoencoder,
    SmallClassifier,
    load_or_make,
    recipe_for,
)
from experiments.runtime.files import sha256

# Wider images need a larger network, and minutes of training.
_LARGEST = 64


class PixelFeatures(Features):
    """The pixels of images of this height and width themselves as features, in 0..1."""

    name = "pixels"
    checksum = "0" * 64

    def __init__(self, shape: tuple[int, int], device: torch.device | str = "cpu") -> None:
        self.dim, self.device = 3 * shape[0] * shape[1], torch.device(device)

    def measure(self, images: Tensor) -> dict[str, Tensor]:
        """Return the flattened pixels, `(B, 3 * H * W)`."""
        return {"features": images.flatten(1).float() / 255}


class TrainedFeatures(Features):
    """A small network that was trained on the data set itself: its classifier or autoencoder."""

    def __init__(
        self, name: str, kept: KeptNetwork, size: int, said: str, device: torch.device | str = "cpu"
    ) -> None:
        self.name, self.size, self.quality = name, size, kept.quality
        self.device = torch.device(device)
        self.model: Any = kept.model.to(device)
        self.dim, self.provides = self.model.dim, self.model.provides
        self.checksum = kept.checksum
        origin = "trained now, kept in" if kept.fresh else "from"
        self.note = f"{name}: {kept.quality:.1%} of {said}, {origin} {kept.path}"

    def measure(self, images: Tensor) -> dict[str, Tensor]:
        """Return features, and logits of a classifier."""
        if images.shape[-2:] != (self.size, self.size):
            raise MetricError(
                f"{self.name} takes images of {self.size}x{self.size} pixels, "
                f"got {images.shape[-1]}x{images.shape[-2]}; choose other features"
            )
        return dict(zip(self.provides, self.model(images), strict=True))


class ProbeFeatures(Features):
    """The network that reads rendered scenes; its weights come with the project."""

    name = "scenes-probe"
    dim = probe.FEATURES

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.checksum = sha256(probe.WEIGHTS) if probe.WEIGHTS.is_file() else ""
        probe.load(str(self.device))

    def measure(self, images: Tensor) -> dict[str, Tensor]:
        """Return features."""
        return {"features": probe.probe(images)["features"]}


def create_features(
    name: str,
    options: EvalOptions | None = None,
    *,
    cache: str | os.PathLike[str],
    dataset: Any = None,
    device: torch.device | str = "cpu",
) -> Features:
    """Return the extractor called `name`.

    Args:
        name: One of `eval_options.FEATURES`.
        options: Where the weights of the large networks are.
        cache: Folder of trained classifiers and downloaded weights.
        dataset: The run's data set; a classifier of another one is refused.
        device: Where the network runs.

    Raises:
        MetricError: An unknown name, a classifier of another data set, or weights that are
            missing.
    """
    check_known("features", (name,), FEATURES)
    options = options or EvalOptions()
    if name == "inception-adm":
        return InceptionFeatures(options.inception_weights, cache=Path(cache), device=device)
    if name.startswith("dinov2-"):
        return DinoFeatures(name, options.dinov2_weights, device=device)
    if name == "scenes-probe":
        return ProbeFeatures(device)
    if name == "autoencoder":
        return _autoencoder(Path(cache), dataset, device)
    return _classifier(name, Path(cache), dataset, device)


def _classifier(
    name: str, cache: Path, dataset: Any, device: torch.device | str
) -> TrainedFeatures:
    wanted = name.removesuffix("-classifier")
    if dataset is None or dataset.name != wanted:
        have = "no data set" if dataset is None else f"the data set {dataset.name}"
        other = ", ".join(f for f in FEATURES if not f.endswith("-classifier"))
        raise MetricError(
            f"{name} is for data={wanted}, here is {have}; choose other features: {other}"
        )
    size, classes = dataset.shape[-1], dataset.num_classes
    recipe = recipe_for(dataset.sizes["train"])
    settings = [CLASSIFIER_VERSION, dataset.name, dataset.pixels_fingerprint, size, classes]
    build = partial(SmallClassifier, size, classes, recipe)
    splits = partial(labelled_images, dataset)
    with main_first():
        trained = load_or_make(cache / "classifiers", dataset.name, settings, recipe, build, splits)
    return TrainedFeatures(name, trained, size, "held-out images right", device)


def _autoencoder(cache: Path, dataset: Any, device: torch.device | str) -> TrainedFeatures:
    if dataset is None:
        raise MetricError(
            "the autoencoder is trained on a data set's images, here is none; pass --data NAME or "
            "choose other features"
        )
    # Latents have another side than the images that they are decoded to.
    size = next(split_images(dataset, "train", torch.arange(1))).shape[-1]
    if size > _LARGEST:
        raise MetricError(
            f"the autoencoder is for images up to {_LARGEST} pixels wide, these are {size}; "
            "choose other features, such as inception-adm"
        )
    recipe = CodeRecipe()
    build = partial(SmallAutoencoder, size, recipe)
    settings = [AUTOENCODER_VERSION, dataset.name, dataset.pixels_fingerprint, size]

    def splits(split: str) -> tuple[Tensor]:
        return (torch.cat([x.cpu() for x in split_images(dataset, split)]),)

    with main_first():
        trained = load_or_make(
            cache / "autoencoders", dataset.name, settings, recipe, build, splits
        )
    said = "the held-out images' variance explained"
    return TrainedFeatures("autoencoder", trained, size, said, device)
