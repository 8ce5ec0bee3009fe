"""Networks with published weights: ADM's Inception for FID, sFID and IS, and DINOv2 for FD-DINOv2.

Weights are downloaded once, checked, and loaded without unpickling anything.
"""

from __future__ import annotations

import functools
import importlib.util
import io
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from backbones.parsing import check_file
from backbones.weights import hub_problem
from experiments.data.data_options import DataError, first_line
from experiments.data.downloads import fetch, unreachable_reason
from experiments.options.evaluation import EvalOptions, MetricError
from experiments.runtime.files import default_cache
from routing.errors import require

INCEPTION_FILE = "weights-inception-2015-12-05-6726825d.pth"
INCEPTION_URL = (
    f"https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/{INCEPTION_FILE}"
)
INCEPTION_SHA256 = "6726825d"  # its first digits
_OPTION = "eval.inception_weights"
_FETCH = f"; without internet access, copy it from elsewhere and pass {_OPTION}=FILE"
DINOV2_MODELS = {
    "dinov2-vitl14": "vit_large_patch14_dinov2.lvd142m",
    "dinov2-vits14": "vit_small_patch14_dinov2.lvd142m",
    "dinov2-vitb14": "vit_base_patch14_dinov2.lvd142m",  # for REPA; no metric uses it
}
_SIDE = 224  # of DINOv2's images
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
            reason = unreachable_reason(INCEPTION_URL)
            message = f"cannot download {INCEPTION_URL} to {path} ({reason}){_FETCH}"
            require(not reason, message, MetricError)
    elif name.startswith("dinov2-") and not options.dinov2_weights:
        from huggingface_hub import try_to_load_from_cache

        model = DINOV2_MODELS[name]
        repository = f"timm/{model}"
        if not isinstance(try_to_load_from_cache(repository, "model.safetensors"), str):
            reason = hub_problem(repository, "model.safetensors")
            message = f"timm's cache has no {model}, and {reason}{_fetch_advice(name)}"
            require(not reason, message, MetricError)


def _check_fidelity_installed() -> None:
    require(
        importlib.util.find_spec("torch_fidelity") is not None,
        'inception-adm needs torch-fidelity; install it with pip install -e ".[metrics]"',
        MetricError,
    )


def _cached_inception(cache: Path) -> Path:
    """Return where Inception's weights are kept once they are downloaded."""
    return cache / "weights" / INCEPTION_FILE


def download_inception(cache: Path) -> Path:
    """Return the file of Inception's weights in the cache, downloaded if it is not there.

    Raises:
        MetricError: The download failed, or the file is another one; the message says how to pass
            the file.
    """
    path = _cached_inception(cache)
    try:
        fetch([INCEPTION_URL], path, INCEPTION_SHA256, "sha256")
    except DataError as error:
        raise MetricError(f"{error}{_FETCH}") from None
    return path


def read_inception(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors in a `.safetensors` or PyTorch file; nothing in it is executed."""
    path = Path(path).expanduser()
    try:
        check_file(path)
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        why = first_line(error)[:120]
        raise MetricError(
            f"{_OPTION}={path} is not readable as torch-fidelity's Inception weights ({why})"
        ) from None


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
            f"{_OPTION}={weights} holds another network; expected {INCEPTION_FILE}"
        ) from None


def build_dinov2(name: str, weights: str | Path | None = None) -> torch.nn.Module:
    """Return timm's network without a head, with the weights of a file or of timm's cache."""
    import timm

    model, file = DINOV2_MODELS[name], None if weights is None else str(Path(weights).expanduser())
    overlay = {"file": file} if file else None
    options: dict[str, Any] = {
        "num_classes": 0,
        "img_size": _SIDE,
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
    repository = f"huggingface.co/timm/{DINOV2_MODELS[name]}"
    return f": fetch model.safetensors of {repository} and pass eval.dinov2_weights=FILE"


@functools.cache
def _imagenet(device: torch.device) -> list[Tensor]:
    # Copied to the device once: a copy in every step of REPA would stall a GPU.
    return [torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (_MEAN, _STD)]


def dinov2_input(images: Tensor) -> Tensor:
    """Return uint8 images (B, 3, H, W) as DINOv2 takes them, (B, 3, 224, 224)."""
    x = images.float()
    if x.shape[-2:] != (_SIDE, _SIDE):
        x = F.interpolate(x, size=(_SIDE, _SIDE), mode="bicubic", antialias=True).clamp(0, 255)
    mean, std = _imagenet(x.device)
    return (x / 255 - mean) / std
