"""Feature extractors: the networks that metrics are computed on, chosen by name.

Every extractor takes uint8 images of any size and does its own resizing, so that two scores with
the same features name went through the same pre-processing. Published weights (ADM's Inception for
FID, sFID and IS; DINOv2 for FD-DINOv2) are fetched once, checked, and loaded without unpickling
anything.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from backbones.weights import hub_problem
from experiments.data import probe
from experiments.data.data_options import DataError, first_line
from experiments.data.dataset import Device, create
from experiments.data.downloads import fetch, unreachable_reason
from experiments.evaluation.images import split_batches, whole_split
from experiments.evaluation.small_networks import (
    AUTOENCODER_VERSION,
    CLASSIFIER_VERSION,
    CodeRecipe,
    NetworkPlan,
    Recipe,
    SmallAutoencoder,
    SmallClassifier,
    checksum,
    load_or_make,
    load_shipped,
)
from experiments.options.evaluation import EvalOptions, MetricError, check_features
from experiments.runtime.files import default_cache, sha256
from routing.errors import require


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


def identity(features: Features) -> str:
    """Return name and start of the weights' checksum, as `digits-classifier@1f2e3d4c`."""
    return f"{features.name}@{features.checksum[:8]}"


# --- published networks ---------------------------------------------------------------------------

URL = "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth"
SHA256 = "6726825d"  # its first digits
SPATIAL_CHANNELS = 7
_WHAT = "torch-fidelity's Inception weights"
_OPTION = "eval.inception_weights"
_FETCH = f"; without internet access, copy it from elsewhere and pass {_OPTION}=FILE"
MODELS = {
    "dinov2-vitl14": "vit_large_patch14_dinov2.lvd142m",
    "dinov2-vits14": "vit_small_patch14_dinov2.lvd142m",
    "dinov2-vitb14": "vit_base_patch14_dinov2.lvd142m",  # for REPA; no metric uses it
}
SIZE = 224
_MEAN = (0.485, 0.456, 0.406)
_STD = (0.229, 0.224, 0.225)


def check_weights(name: str, options: EvalOptions, cache: str | None) -> None:
    """Refuse a published network whose weights are not here and cannot be downloaded.

    For checks before a run: nothing is read or downloaded. `cache` is the run's `paths.cache`.

    Raises:
        MetricError: A run that uses the network would fail.
    """
    if name == "inception-adm":
        _check_fidelity_installed()
        path = _cached_inception(Path(cache).expanduser() if cache else default_cache())
        if not options.inception_weights and not path.is_file():
            reason = unreachable_reason(URL)
            require(not reason, f"cannot download {URL} to {path} ({reason}){_FETCH}", MetricError)
    elif name.startswith("dinov2-") and not options.dinov2_weights:
        from huggingface_hub import try_to_load_from_cache

        repository = f"timm/{MODELS[name]}"
        if not isinstance(try_to_load_from_cache(repository, "model.safetensors"), str):
            reason = hub_problem(repository, "model.safetensors")
            message = f"timm's cache has no {MODELS[name]}, and {reason}{_fetch_advice(name)}"
            require(not reason, message, MetricError)


def _check_fidelity_installed() -> None:
    require(
        importlib.util.find_spec("torch_fidelity") is not None,
        'inception-adm needs torch-fidelity; install it with pip install -e ".[metrics]"',
        MetricError,
    )


def _cached_inception(cache: Path) -> Path:
    """Return where Inception's weights are kept once they are downloaded."""
    return cache / "weights" / URL.rsplit("/", 1)[1]


def _published(cache: Path) -> Path:
    """Return the file of Inception's weights in the cache, downloaded if it is not there.

    Raises:
        MetricError: The download failed, or the file is another one; the message says how to pass
            the file.
    """
    path = _cached_inception(cache)
    try:
        fetch([URL], path, SHA256, "sha256")
    except DataError as error:
        raise MetricError(f"{error}{_FETCH}") from None
    return path


def read_inception(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors in a `.safetensors` or PyTorch file; nothing in it is executed."""
    path = Path(path).expanduser()
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        why = first_line(error)[:120]
        raise MetricError(f"{_OPTION}={path} is not readable as {_WHAT} ({why})") from None


def build_inception(weights: str | Path) -> torch.nn.Module:
    """Return torch-fidelity's network with weights of a file: outputs `2048`, `logits_unbiased`."""
    _check_fidelity_installed()
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    # Upstream would unpickle the file, so it gets the tensors that were read from it safely.
    state = io.BytesIO()
    torch.save(read_inception(weights), state)
    state.seek(0)
    outputs = ["2048", "logits_unbiased"]
    try:
        return FeatureExtractorInceptionV3(
            "inception-adm", outputs, feature_extractor_weights_path=state
        )
    except (RuntimeError, AttributeError, TypeError):
        raise MetricError(
            f"{_OPTION}={weights} holds another network; expected {URL.rpartition('/')[2]}"
        ) from None


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
        spatial = branch.pop()[:, :SPATIAL_CHANNELS].permute(0, 2, 3, 1).flatten(1).float()
        return {"features": features, "logits": logits, "spatial": spatial}

    return Features("inception-adm", 2048, checksum(network), measure, device)


def build_dinov2(name: str, weights: str | Path | None = None) -> torch.nn.Module:
    """Return timm's network without a head, with the weights of a file or of timm's cache."""
    import timm

    model, file = MODELS[name], None if weights is None else str(Path(weights).expanduser())
    overlay = {"file": file} if file else None
    options: dict[str, Any] = {
        "num_classes": 0,
        "img_size": SIZE,
        "pretrained_cfg_overlay": overlay,
    }
    try:
        if file and not Path(file).is_file():  # timm would log it beside the error
            raise FileNotFoundError("no such file")
        return timm.create_model(model, pretrained=True, **options)
    except Exception as error:
        where = f"eval.dinov2_weights={weights} does not hold" if file else "timm's cache has no"
        problem = f"{where} {model}, or it cannot be read ({first_line(error)[:120]})"
        raise MetricError(problem + _fetch_advice(name)) from None


def _fetch_advice(name: str) -> str:
    """Return how to get the weights of a DINOv2 network, to be appended to an error."""
    repository = f"huggingface.co/timm/{MODELS[name]}"
    return f": fetch model.safetensors of {repository} and pass eval.dinov2_weights=FILE"


@functools.cache
def _imagenet(device: torch.device) -> list[Tensor]:
    # Copied to the device once: a copy in every step of REPA would stall a GPU.
    return [torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (_MEAN, _STD)]


def dinov2_input(images: Tensor) -> Tensor:
    """Return uint8 images (B, 3, H, W) as DINOv2 takes them, (B, 3, 224, 224)."""
    x = images.float()
    if x.shape[-2:] != (SIZE, SIZE):
        x = F.interpolate(x, size=(SIZE, SIZE), mode="bicubic", antialias=True).clamp(0, 255)
    mean, std = _imagenet(x.device)
    return (x / 255 - mean) / std


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


# Wider images need a larger network, and minutes of training.
_LARGEST = 64


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
        return inception(build_inception(options.inception_weights or _published(cache)), device)
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
