"""The weaker model of autoguidance and of routed guidance."""

from __future__ import annotations

import torch

from experiments.config.parent import split
from experiments.evaluation.trained_model import load_model
from experiments.options.objective import ObjectiveOptions, check_same_network


def load_weak_model(
    checkpoint: str, objective: ObjectiveOptions, device: torch.device | str
) -> torch.nn.Module:
    """Load the model that `guidance.checkpoint` names, as `RUN@STEP` or a weights file.

    Raises:
        ConfigError: It was trained on another objective than the main model's.
    """
    path, step = split(checkpoint, "guidance.checkpoint=")
    loaded = load_model(path, step=step, device=device)
    check_same_network(f"guidance.checkpoint={checkpoint}", loaded.config.objective, objective)
    model: torch.nn.Module = loaded.model
    return model
