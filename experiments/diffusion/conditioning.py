"""Labels and captions as the network receives them, some dropped for classifier-free guidance."""

from __future__ import annotations

from typing import Any

import torch

from backbones import Backbone
from experiments.data.dataset import Batch
from routing.rng import Draws


def make_conditions(
    model: Backbone, batch: Batch, draws: Draws, drop_fraction: float
) -> dict[str, Any]:
    """Return the model's keyword arguments for the labels or captions of a batch.

    A `drop_fraction` of the samples, chosen by the stream `drop` of `draws`, gets the null class
    or the null text instead.
    """
    if not (model.num_classes or model.text is not None):
        return {}
    drop = draws.uniform("drop", 1)[:, 0] < drop_fraction
    conditions: dict[str, Any] = {}
    if batch.y is not None and model.num_classes:
        # The class after the last one is the null class.
        conditions["y"] = torch.where(drop, torch.full_like(batch.y, model.num_classes), batch.y)
    if model.text is not None:
        conditions["text"] = batch.text
        conditions["text_drop"] = drop
    return conditions
