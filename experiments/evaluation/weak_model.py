"""The weaker model of autoguidance and of routed guidance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from experiments.config.parent import split
from experiments.options.diffusion import check_weights
from experiments.training.checkpoint import load_model


def load_weak_model(
    checkpoint: str, objective: Mapping[str, Any], device: torch.device | str
) -> torch.nn.Module:
    """Load the model that `guidance.checkpoint` names, as `RUN@STEP` or a weights file.

    Raises:
        DiffusionError: It was trained on another objective than the main model's.
    """
    path, step = split(checkpoint, "guidance.checkpoint=")
    loaded = load_model(path, step=step, device=device)
    check_weights(f"guidance.checkpoint={checkpoint}", loaded.config.objective, objective)
    model: torch.nn.Module = loaded.model
    return model
