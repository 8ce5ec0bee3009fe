"""What several tests of evaluation use: exported weights of small models, and random pictures."""

from __future__ import annotations

from pathlib import Path

import torch
from small import make_model_and_data

from experiments.components import describe_data
from experiments.config.schema import Config
from experiments.evaluation import trained_model


def export_weights(path: Path, config: Config) -> Path:
    """Write the weights of a run at step 7; they are random."""
    model, dataset = make_model_and_data(config)
    trained_model.export(path, model, model.state_dict(), config, 7, describe_data(dataset))
    return path


def pictures(n: int, side: int = 8, seed: int = 0) -> torch.Tensor:
    """Return noise, uint8 (n, 3, side, side)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, 3, side, side), generator=generator, dtype=torch.uint8)
