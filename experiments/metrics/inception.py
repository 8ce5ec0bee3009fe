"""Inception v3 of 2015 with ADM's protocol, on torch-fidelity's port of the TensorFlow graph.

ADM (Dhariwal and Nichol 2021) compares three outputs of the network:

    pool_3                  2048 pooled features: FID, precision, recall, KID
    mixed_6/conv, first 7   1x1 branch of a 17x17 block, 17*17*7 = 2023: sFID (Nash et al. 2021)
    softmax without bias    1008 logits: Inception Score

The TensorFlow blocks are called mixed, mixed_1, ...; mixed_6 is the port's Mixed_6d. The graph's
rows run over height, width, then channel, and so do ours, or mu_s and sigma_s of a published
reference batch would not fit.
"""

from __future__ import annotations

import io
from pathlib import Path

import torch
from torch import Tensor

from experiments.metrics.classifier import checksum
from experiments.metrics.features import check_images
from experiments.metrics.fetched_weights import fetch, load_state
from experiments.metrics.metric_names import MetricError

URL = "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth"
SPATIAL_CHANNELS = 7
_WHAT = "torch-fidelity's Inception weights"
_OPTION = "eval.inception_weights"


def build_inception() -> torch.nn.Module:
    """Return torch-fidelity's network with untrained weights: outputs `2048` and `logits_unbiased`.

    Raises:
        MetricError: torch-fidelity is not installed.
    """
    try:
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    except ImportError:
        raise MetricError(
            'inception-adm needs torch-fidelity; install it with pip install -e ".[metrics]"'
        ) from None

    class Inception(FeatureExtractorInceptionV3):
        """Loads nothing while it is built: upstream would download, or unpickle a file."""

        def load_state_dict(
            self, state_dict: dict, strict: bool = True, assign: bool = False
        ) -> object:
            if not state_dict:
                return None
            return super().load_state_dict(state_dict, strict=strict, assign=assign)

    empty = io.BytesIO()
    torch.save({}, empty)
    empty.seek(0)
    return Inception(
        "inception-adm", ["2048", "logits_unbiased"], feature_extractor_weights_path=empty
    )


class InceptionFeatures:
    """Pooled features, spatial features and logits of ADM's Inception.

    Args:
        weights: File with the weights; None looks in the cache and downloads them once.
        cache: Folder of the cache.
        device: Where the network runs.
        network: A network of `build_inception` to use as it is, for tests and for weights from
            elsewhere.
    """

    name = "inception-adm"
    dim = 2048
    provides: tuple[str, ...] = ("features", "logits", "spatial")
    note = ""

    def __init__(
        self,
        weights: str | Path | None,
        *,
        cache: Path,
        device: torch.device | str = "cpu",
        network: torch.nn.Module | None = None,
    ) -> None:
        if network is None:
            network = build_inception()
            if weights is None:
                weights = fetch(
                    URL, cache / "weights" / URL.rsplit("/", 1)[1], "6726825d", _WHAT, _OPTION
                )
            state = load_state(weights, _WHAT, _OPTION)
            try:
                network.load_state_dict(state)
            except (RuntimeError, AttributeError, TypeError):
                raise MetricError(
                    f"{_OPTION}={weights} holds another network; expected {URL.rsplit('/', 1)[1]}"
                ) from None
        self.network = network.eval().requires_grad_(False).to(device)
        self.device = torch.device(device)
        self.checksum = checksum(network)
        self._spatial: Tensor | None = None
        network.get_submodule("Mixed_6d.branch1x1").register_forward_hook(self._keep)

    def _keep(self, module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self._spatial = output[:, :SPATIAL_CHANNELS].permute(0, 2, 3, 1).flatten(1).float()

    @torch.no_grad()
    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """Return features `(B, 2048)`, logits `(B, 1008)` and spatial rows `(B, 2023)`."""
        check_images(images)
        features, logits = self.network(images.to(self.device))
        assert self._spatial is not None, "the hook on Mixed_6d.branch1x1 did not run"
        spatial, self._spatial = self._spatial, None
        return {"features": features, "logits": logits, "spatial": spatial}
