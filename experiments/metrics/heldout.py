"""Held-out data under noise that depends on nothing but them, and a model's loss on them.

The noise of held-out sample i in draw k is a function of (i, k): two models are compared on the
same noisy inputs whatever their seeds, routes and backbones, which takes most of the noise out of
the difference between their losses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.config.schema import Config
from experiments.diffusion.auxiliary_losses import masked_mean, pixel_mask
from experiments.diffusion.objective import Objective, create_objective
from experiments.metrics.collect import exact, gather_rows, share
from experiments.metrics.eval_options import Score
from experiments.metrics.images import split_indices
from experiments.metrics.meters import scored
from experiments.sampling.generation import evaluating
from experiments.training.build import make_dataset
from experiments.training.checkpoint import load_model
from experiments.training.loss import Capture, conditions
from experiments.training.routes import routed_pass
from routing.rng import Draws

#: A loss is measured on so many held-out images at most, and on several noisy inputs of each where
#: there are fewer than half of these.
IMAGES, INPUTS = 2000, 1000
_SEED = 424242
_GOLDEN, _SILVER = (math.sqrt(5) - 1) / 2, math.sqrt(2) - 1


class Sample(NamedTuple):
    """Some held-out samples: clean data and standard normal noise, (B, C, H, W).

    `cond` and `null` are their own and the null condition, as the model takes them; the noise came
    from `draws`, and so does a route's subset.
    """

    x: Tensor
    noise: Tensor
    cond: dict[str, Any]
    null: dict[str, Any]
    draws: Draws


@dataclass
class HeldOut:
    """A model (of a run, on a device, after `step` steps) before its held-out data."""

    model: Any
    config: Config
    dataset: Any
    objective: Objective
    device: torch.device
    step: int | None = None

    @classmethod
    def open(
        cls, run: str | Path, step: int | None = None, weights: str = "ema", device: Any = None
    ) -> HeldOut:
        """Open a run folder or exported weights, in evaluation mode, with the run's data."""
        loaded = load_model(run, step=step, weights=weights, device=device)
        config, at = loaded.config, next(loaded.model.parameters()).device
        parts = (make_dataset(config, at), create_objective(config.objective), at)
        return cls(loaded.model.eval(), config, *parts, loaded.step)

    def sample(
        self, index: Tensor, draw: int = 0, seed: int = _SEED, stream: str = "noise"
    ) -> Sample:
        """Return the held-out samples at `index` (B,) with their noise of one draw."""
        index = index.to(self.device)
        draws = Draws(seed, draw, index, device=self.device)
        batch = self.dataset.batch(index, draws, split="test")
        noise = draws.normal(stream, tuple(batch.x.shape[1:])).to(batch.x)
        given, null = (conditions(self.model, batch, draws, dropped) for dropped in (0.0, 1.0))
        return Sample(batch.x, noise, given, null, draws)

    def noisy(self, found: Sample, level: float) -> tuple[Tensor, Tensor]:
        """Return noisy data (B, C, H, W) and their native time (B,) at a noise level.

        The level is sigma / alpha over the data's standard deviation, whatever the objective.
        """
        level = level * self.objective.sigma_data
        time = self.objective.from_level(torch.full((len(found.x),), level, device=self.device))
        return self.objective.corrupt(found.x, found.noise, time), time

    def losses(self, index: Tensor, draw: int = 0) -> list[Tensor]:
        """Return the mean loss of the dense pass, and of the routed one where there is a route.

        It is the objective's own loss, with its weights and without auxiliary terms, at noise
        levels spread evenly over those of training. A routed pass that drops tokens for good is
        measured on those that it keeps.
        """
        x, noise, cond, _, draws = self.sample(index, draw)
        time = self.objective.times(_Spread(index, draw)).to(self.device)
        found, routed = [], routed_pass(self.config, draws)
        for routing in (None, routed) if routed else (None,):
            net = Capture(self.model)
            terms = self.objective.loss(net, x, noise, time, **cond, routing=routing).float()
            kept = net.output.kept
            if kept is not None:
                mask = pixel_mask(kept.expand(len(x), -1), self.model.grid, self.model.size.patch)
            found.append(terms.mean() if kept is None else masked_mean(terms, mask))
        return found


class _Spread:
    """What `Objective.times` draws from: one number per sample, evenly spread over [0, 1).

    A Kronecker sequence: any stretch of samples, and the draws of any one, cover the interval.
    """

    def __init__(self, index: Tensor, draw: int) -> None:
        place = (index.cpu().double() + 0.5) * _GOLDEN + draw * _SILVER
        self._at = place.frac().unsqueeze(1)

    def uniform(self, stream: str, n: int) -> Tensor:
        """Return the numbers, (B, 1)."""
        return self._at.float()

    def normal(self, stream: str, shape: int) -> Tensor:
        """Return the quantiles of the standard normal distribution there, (B, 1)."""
        return torch.special.ndtri(self._at).float()


def no_split(dataset: Any) -> str:
    """Return why a data set has nothing held out, as part of a sentence; empty where it has."""
    if dataset.sizes.get("test", 0) != 0:
        return ""
    hint = "; set data.held_out=N or data.test=FOLDER" if dataset.name == "latents" else ""
    return f"data={dataset.name} has no held-out split here{hint}"


def scores(data: HeldOut, batch: int, **record: Any) -> list[Score]:
    """Return the held-out loss of both passes over all processes; a collective call.

    `batch` is the images per pass and process, `record` what all scores of the run have in common.
    """
    index = split_indices(data.dataset, "test", IMAGES)
    mine = share(len(index))
    own, names = index[mine.start : mine.stop], ["heldout_loss"]
    if routed_pass(data.config, None):
        names.append("heldout_loss_routed")
    total = torch.zeros(1 + len(names), dtype=torch.float64)
    with torch.inference_mode(), evaluating(data.model), exact():
        for draw in range(max(1, INPUTS // len(index))):
            # A process without a sample has no loss; it only waits for the others.
            for part in own.split(batch) if len(own) else ():
                found = torch.stack(data.losses(part, draw)).cpu()
                total += len(part) * torch.cat((torch.ones(1), found))
    count, *sums = gather_rows(total.unsqueeze(0)).sum(dim=0).tolist()
    label = f"{data.dataset.name}-test@{data.dataset.fingerprint[:8]}"
    return [
        scored(name, value / count, len(index), None, None, label, record)
        for name, value in zip(names, sums, strict=True)
    ]
