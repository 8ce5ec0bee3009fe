"""The alignment loss of a run: to a frozen encoder (REPA), to its own EMA (SRA), or none."""

from __future__ import annotations

from experiments.config.schema import Config
from experiments.data.dataset import Dataset
from experiments.diffusion.objective import Objective
from experiments.options.training import SELF_ENCODER
from experiments.training.repa import FeatureAlignment
from experiments.training.sra import SelfAlignment
from experiments.training.state import TrainingState


def create_alignment(
    config: Config, dataset: Dataset, state: TrainingState, objective: Objective
) -> FeatureAlignment | SelfAlignment | None:
    """Return what `train.encoder` names; None for `none`."""
    if config.train.encoder == "none":
        return None
    if config.train.encoder == SELF_ENCODER:
        return SelfAlignment(config, state, objective)
    model = state.model
    return FeatureAlignment(config, dataset, model.grid, model.positions.device)
