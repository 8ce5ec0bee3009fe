"""A trained model and its held-out data under fixed noise.

The noise of held-out sample i in draw k is a function of (i, k) alone. Two models are compared on
the same noisy inputs regardless of their seeds, routes and backbones, which removes most of the
noise from the difference of their losses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.components import make_dataset
from experiments.config.schema import Config
from experiments.diffusion.auxiliary_losses import masked_mean, pixel_mask
from experiments.diffusion.objectives import Objective, create_objective
from experiments.evaluation.trained_model import load_model
from routing.rng import Draws
from routing.routed_pass import Routing

_SEED = 424242
# Steps of the two Kronecker sequences: irrational numbers that rationals approximate badly.
_GOLDEN, _SILVER = (math.sqrt(5) - 1) / 2, math.sqrt(2) - 1


class Sample(NamedTuple):
    """Some held-out samples: clean data and standard normal noise, (B, C, H, W).

    `cond` and `null` are the samples' condition and the null condition, as the model takes them;
    `draws` made the noise and selects the tokens of a route.
    """

    x: Tensor
    noise: Tensor
    cond: dict[str, Any]
    null: dict[str, Any]
    draws: Draws


def routed_pass(config: Config, draws: Draws | None) -> Routing | None:
    """Return the routing of a run's first route, with tokens from `draws`; None for a dense run."""
    if config.routing.off_after == 0 or not config.first_route:
        return None
    return Routing(config.first_route, config.routing, draws)


@dataclass
class HeldOut:
    """A model of a run with the run's held-out data."""

    model: Any
    config: Config
    dataset: Any
    objective: Objective
    device: torch.device
    step: int | None = None  # training step of the weights

    @classmethod
    def open(
        cls, run: str | Path, step: int | None = None, weights: str = "ema", device: Any = None
    ) -> HeldOut:
        """Open a run folder or exported weights, in evaluation mode, with the run's data."""
        loaded = load_model(run, step=step, weights=weights, device=device)
        config, device = loaded.config, next(loaded.model.parameters()).device
        dataset, objective = make_dataset(config, device), create_objective(config.objective)
        return cls(loaded.model.eval(), config, dataset, objective, device, loaded.step)

    def sample(
        self, index: Tensor, draw: int = 0, seed: int = _SEED, stream: str = "noise"
    ) -> Sample:
        """Return the held-out samples at `index` (B,) with their noise of one draw."""
        index = index.to(self.device)
        draws = Draws(seed, draw, index, device=self.device)
        batch = self.dataset.batch(index, draws, split="test")
        noise = draws.normal(stream, tuple(batch.x.shape[1:])).to(batch.x)
        drop = torch.ones(len(batch.x), dtype=torch.bool, device=self.device)
        condition = self.model.conditions(batch.y, batch.text, ~drop)
        null = self.model.conditions(batch.y, batch.text, drop)
        return Sample(batch.x, noise, condition, null, draws)

    def noisy(self, sample: Sample, level: float) -> tuple[Tensor, Tensor]:
        """Return noisy data (B, C, H, W) and their native time (B,) at a noise level.

        The level is sigma / alpha over the data's standard deviation, whatever the objective.
        """
        level = level * self.objective.sigma_data
        time = self.objective.from_level(torch.full((len(sample.x),), level, device=self.device))
        return self.objective.corrupt(sample.x, sample.noise, time), time

    def losses(self, index: Tensor, draw: int = 0, dense: bool = True) -> list[Tensor]:
        """Return the mean loss of the dense pass, and of the routed one where there is a route.

        Without `dense` only the routed pass is measured. The loss is the objective's own, with its
        weights and without auxiliary terms, at noise levels spread evenly over those of training. A
        routed pass that drops tokens for good is measured on those that it keeps.
        """
        x, noise, cond, _, draws = self.sample(index, draw)
        time = self.objective.times(_EvenNoiseLevels(index, draw)).to(self.device)
        pair = self.objective.training_pair(x, noise, time)
        inputs = pair.inputs.to(self.model.dtype)
        routed = routed_pass(self.config, draws)
        routings = ([None] if dense else []) + ([routed] if routed else [])
        losses = []
        for routing in routings:
            output = self.model(inputs, pair.time, **cond, routing=routing, return_output=True)
            loss_map = self.objective.loss_map(output.sample, pair).float()
            if output.kept is None:
                losses.append(loss_map.mean())
            else:
                kept = output.kept.expand(len(x), -1)
                mask = pixel_mask(kept, self.model.grid, self.model.size.patch)
                losses.append(masked_mean(loss_map, mask))
        return losses


class _EvenNoiseLevels:
    """Stands in for `Draws` in `Objective.times`: one number per sample, evenly spread over [0, 1).

    A Kronecker sequence: any stretch of samples, and the draws of any one, cover the interval.
    """

    def __init__(self, index: Tensor, draw: int) -> None:
        position = (index.cpu().double() + 0.5) * _GOLDEN + draw * _SILVER
        self._quantile = position.frac().unsqueeze(1)

    def uniform(self, stream: str, n: int) -> Tensor:
        """Return the numbers, (B, 1)."""
        return self._quantile.float()

    def normal(self, stream: str, shape: int) -> Tensor:
        """Return the quantiles of the standard normal distribution there, (B, 1)."""
        return torch.special.ndtri(self._quantile).float()


def no_split(dataset: Any) -> str:
    """Return why a data set has no held-out split, as part of a sentence; empty if it has one."""
    if dataset.sizes.get("test", 0) != 0:
        return ""
    hint = "; set data.held_out=N or data.test=FOLDER" if dataset.name == "latents" else ""
    return f"data={dataset.name} has no held-out split here{hint}"
