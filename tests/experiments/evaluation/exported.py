"""Exported weights of small models, as training leaves them, for the tests of the commands that open them."""

from __future__ import annotations

from pathlib import Path

from small import make_model_and_data

from experiments.components import describe_data
from experiments.config.schema import Config
from experiments.evaluation import trained_model


def export_weights(path: Path, config: Config) -> Path:
    """Write the weights of a run at step 7; they are random."""
    model, dataset = make_model_and_data(config)
    trained_model.export(path, model, model.state_dict(), config, 7, describe_data(dataset))
    return path
