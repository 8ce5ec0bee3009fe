"""What one training step minimises, for every objective and routing variant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from experiments.build import drop_condition

if TYPE_CHECKING:
    from backbones import Backbone
    from experiments.config import TrainConfig
    from experiments.data import Batch
    from experiments.diffusion import Objective
    from routing import Draws, Routing


def training_loss(
    net: Any,
    model: Backbone,
    objective: Objective,
    batch: Batch,
    draws: Draws,
    routing: Routing | None,
    train: TrainConfig,
) -> Tensor:
    """Return the mean loss of one piece of the global batch.

    Args:
        net: What is called: the model, or its data-parallel wrapper.
        model: The model itself.
        objective: Corruption, target and weights.
        batch: Clean data and conditions.
        draws: This step's random numbers for these samples: streams `sigma`, `noise`, `drop`.
        routing: What to do about routes.
        train: Label drop and the kind of loss.
    """
    time = objective.times(draws)
    noise = draws.normal("noise", tuple(batch.x.shape[1:]))
    cond: dict[str, Any] = {}
    if model.num_classes or model.prefix:
        drop = draws.uniform("drop", 1)[:, 0] < train.label_drop
        cond = drop_condition(model, batch.y, drop)
        if model.prefix:
            cond |= {"text": batch.text, "text_drop": drop}
    loss = objective.loss(net, batch.x, noise, time, **cond, routing=routing)
    return loss.float().mean()
