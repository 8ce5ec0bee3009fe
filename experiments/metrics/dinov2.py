"""DINOv2 features through timm, for FD-DINOv2 (Stein et al. 2023).

The images are resized to 224x224 (bicubic, antialiased), scaled by ImageNet's mean and standard
deviation, and the class token after the last norm is the feature. timm interpolates the position
embedding from 518 to 224 pixels once at loading where the original does so in every forward pass:
the numbers agree closely, not to the last digit, so both distances of a comparison have to come
from the same extractor, which the reference's check enforces.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.metrics.classifier import checksum
from experiments.metrics.features import check_images
from experiments.metrics.metric_names import MetricError

MODELS = {
    "dinov2-vitl14": "vit_large_patch14_dinov2.lvd142m",
    "dinov2-vits14": "vit_small_patch14_dinov2.lvd142m",
    "dinov2-vitb14": "vit_base_patch14_dinov2.lvd142m",  # REPA's; no metric is named after it
}
SIZE = 224
_MEAN = (0.485, 0.456, 0.406)
_STD = (0.229, 0.224, 0.225)


def build_dinov2(
    name: str, weights: str | Path | None = None, pretrained: bool = True
) -> torch.nn.Module:
    """Return timm's network, without a head.

    Args:
        name: One of `MODELS`.
        weights: Local file with the weights (timm's safetensors or the original pth).
        pretrained: False leaves the weights random, for tests.

    Raises:
        MetricError: The weights cannot be had.
    """
    import timm

    model = MODELS[name]
    overlay = None
    if weights is not None:
        if not Path(weights).expanduser().is_file():
            raise MetricError(
                f"eval.dinov2_weights={weights}: no such file; expected {model} of timm"
            )
        overlay = {"file": str(Path(weights).expanduser())}
    try:
        return timm.create_model(
            model,
            pretrained=pretrained,
            pretrained_cfg_overlay=overlay,
            num_classes=0,
            img_size=SIZE,
        )
    except Exception as error:
        if not pretrained:
            raise
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        if weights is not None:
            raise MetricError(
                f"eval.dinov2_weights={weights} does not hold {model} ({line[:120]})"
            ) from None
        raise MetricError(
            f"weights of {model} are not in timm's cache and could not be downloaded "
            f"({line[:120]}): fetch model.safetensors of huggingface.co/timm/{model} "
            "and pass eval.dinov2_weights=FILE"
        ) from None


class DinoFeatures:
    """Class tokens of DINOv2.

    Args:
        name: `dinov2-vitl14` or `dinov2-vits14`.
        weights: Local file with the weights; None: timm's cache, else a download.
        device: Where the network runs.
        network: A network of `build_dinov2` to use as it is, for tests.
    """

    provides: tuple[str, ...] = ("features",)
    note = ""

    def __init__(
        self,
        name: str,
        weights: str | Path | None = None,
        *,
        device: torch.device | str = "cpu",
        network: torch.nn.Module | None = None,
    ) -> None:
        self.name = name
        network = build_dinov2(name, weights) if network is None else network
        self.network = network.eval().requires_grad_(False).to(device)
        self.device = torch.device(device)
        self.dim = int(self.network.num_features)  # type: ignore[arg-type]
        self.checksum = checksum(network)
        self.mean = torch.tensor(_MEAN, device=device).view(1, 3, 1, 1)
        self.std = torch.tensor(_STD, device=device).view(1, 3, 1, 1)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """Return features `(B, dim)`; see `Features`."""
        check_images(images)
        x = images.to(self.device).float()
        if x.shape[-2:] != (SIZE, SIZE):
            x = F.interpolate(x, size=(SIZE, SIZE), mode="bicubic", antialias=True).clamp(0, 255)
        return {"features": self.network((x / 255 - self.mean) / self.std)}
