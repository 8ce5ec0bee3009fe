"""Feature extractors: the networks that metrics are computed on, chosen by name.

Every extractor takes uint8 images of any size and does its own resizing, so that two scores with
the same features name went through the same pre-processing. The networks are published ones
(`published_networks`), or trained on the data set itself (`small_networks`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.data import probe
from experiments.data.dataset import Device, create
from experiments.evaluation.images import whole_split
from experiments.evaluation.published_networks import (
    build_dinov2,
    build_inception,
    dinov2_input,
    download_inception,
)
from experiments.evaluation.small_networks import (
    checksum,
    load_or_make,
    load_shipped,
    own_network_plan,
)
from experiments.options.evaluation import EvalOptions, MetricError, check_features
from experiments.runtime.files import sha256
from routing.errors import require

_SPATIAL_CHANNELS = 7  # of Inception's mixed_6/conv, which sFID compares


@dataclass(frozen=True)
class Features:
    """A feature extractor."""

    name: str  # one of `options.evaluation.FEATURES`
    dim: int  # length of a feature vector
    checksum: str  # SHA-256 of its weights
    # From uint8 images `(B, 3, H, W)` on its device to float32 `features` `(B, dim)`, and to
    # `logits` and `spatial` rows where it has them
    measure: Callable[[Tensor], dict[str, Tensor]]
    device: Device = "cpu"  # where it runs
    note: str = ""  # a line for the log, such as the classifier's accuracy

    @torch.no_grad()
    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """Return the outputs of `measure` for images on any device."""
        require(
            images.dtype == torch.uint8 and images.ndim == 4 and images.shape[1] == 3,
            "features take uint8 images of shape (B, 3, H, W), "
            f"got {images.dtype} {tuple(images.shape)}",
            MetricError,
        )
        return self.measure(images.to(self.device))

    @property
    def identity(self) -> str:
        """Name and start of the weights' checksum, as `digits-classifier@1f2e3d4c`."""
        return f"{self.name}@{self.checksum[:8]}"


def inception(network: torch.nn.Module, device: Device = "cpu") -> Features:
    """Return Inception v3 of 2015 on torch-fidelity's port of the TensorFlow graph.

    ADM (Dhariwal and Nichol 2021) compares three outputs of the network:

        pool_3                  2048 pooled features: FID, precision, recall, KID
        mixed_6/conv, first 7   1x1 branch of a 17x17 block, 17*17*7 = 2023: sFID (Nash et al. 2021)
        softmax without bias    1008 logits: Inception Score

    mixed_6 is the port's Mixed_6d. The graph's rows run over height, width, then channel, and so do
    ours, or mu_s and sigma_s of a published reference batch would not fit.
    """
    network = network.eval().requires_grad_(False).to(device)
    branch: list[Tensor] = []
    hooked = network.get_submodule("Mixed_6d.branch1x1")
    hooked.register_forward_hook(lambda module, inputs, output: branch.append(output))

    def measure(images: Tensor) -> dict[str, Tensor]:
        """Return features `(B, 2048)`, logits `(B, 1008)` and spatial rows `(B, 2023)`."""
        features, logits = network(images)
        spatial = branch.pop()[:, :_SPATIAL_CHANNELS].permute(0, 2, 3, 1).flatten(1).float()
        return {"features": features, "logits": logits, "spatial": spatial}

    return Features("inception-adm", 2048, checksum(network), measure, device)


def dinov2(name: str, network: Any, device: Device = "cpu") -> Features:
    """Return class tokens of DINOv2 after the last norm, for FD-DINOv2 (Stein et al. 2023).

    Images are resized to 224x224 (bicubic, antialiased) and scaled by ImageNet's mean and standard
    deviation. timm interpolates the position embedding from 518 to 224 pixels once at loading, the
    original in every forward pass: the numbers agree closely, not to the last digit, so both sides
    of a distance have to come from this extractor, which the reference's check enforces.
    """
    network = network.eval().requires_grad_(False).to(device)

    def measure(images: Tensor) -> dict[str, Tensor]:
        return {"features": network(dinov2_input(images))}

    return Features(name, network.num_features, checksum(network), measure, device)


# --- by name --------------------------------------------------------------------------------------


def pixel_features(shape: tuple[int, int], device: Device = "cpu") -> Features:
    """Return the pixels of images of this height and width themselves as features, in 0..1."""

    def measure(images: Tensor) -> dict[str, Tensor]:
        return {"features": images.flatten(1).float() / 255}

    return Features("pixels", 3 * shape[0] * shape[1], "0" * 64, measure, device)


def create_features(
    name: str,
    options: EvalOptions | None = None,
    *,
    cache: str | os.PathLike[str],
    dataset: Any = None,
    device: Device = "cpu",
) -> Features:
    """Return the extractor called `name`, one of `options.evaluation.FEATURES`.

    Args:
        name: The extractor.
        options: Paths of the weights of Inception and DINOv2.
        cache: Folder of trained networks and downloaded weights.
        dataset: The run's data set, which the small networks are trained on.
        device: Where the extractor runs.

    Raises:
        MetricError: An unknown name, a classifier of another data set, or missing weights.
    """
    check_features(name, None if dataset is None else dataset.name)
    options, cache = options or EvalOptions(), Path(cache)
    if name == "inception-adm":
        weights = options.inception_weights or download_inception(cache)
        return inception(build_inception(weights), device)
    if name.startswith("dinov2-"):
        return dinov2(name, build_dinov2(name, options.dinov2_weights), device)
    if name == "scenes-probe":
        probe.load(str(device))  # refuses missing weights
        return Features(name, probe.FEATURES, sha256(probe.WEIGHTS), probe.probe, device)
    require(
        dataset is not None,
        "the autoencoder is trained on a data set's images, and none is given; pass --data NAME or "
        "choose other features",
        MetricError,
    )
    if name != "autoencoder" and dataset.task != "class":  # a classifier needs the labels
        dataset = create(dataset.options, task="class", device=dataset.device)
    return _own_network(name, dataset, cache, device)


def _own_network(name: str, dataset: Any, cache: Path, device: Device) -> Features:
    """Return the extractor of a data set's classifier or autoencoder.

    The network in the package is used if it was trained on the same images.
    """
    kind = "autoencoder" if name == "autoencoder" else "classifier"
    plan = own_network_plan(kind, dataset)
    size = plan.size
    network = load_shipped(plan)
    origin = "comes with the package"
    if network is None:
        network = load_or_make(cache / f"{kind}s", plan, partial(whole_split, dataset))
        origin = f"{'trained now, kept in' if network.fresh else 'from'} {network.path}"
    model = network.model.to(device)

    def measure(images: Tensor) -> dict[str, Tensor]:
        require(
            images.shape[-2:] == (size, size),
            f"{name} takes images of {size}x{size} pixels, "
            f"got {images.shape[-1]}x{images.shape[-2]}; choose other features",
            MetricError,
        )
        return model(images)

    quality = "accuracy on held-out images"
    if kind == "autoencoder":
        quality = "of held-out variance explained"
    note = f"{name}: {network.quality:.1%} {quality} ({origin})"
    return Features(name, model.dim, checksum(model), measure, device, note)
