"""What sampling one image costs, in multiply-accumulates and network calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from backbones.cost import cost as backbone_cost
from experiments.diffusion.guidance import Guidance
from experiments.diffusion.objective import Objective
from experiments.diffusion.samplers import Sampler
from experiments.evaluation.guided_denoiser import group_passes, progress_of

#: `cost(rate, weak, skipped)`: MACs of one pass of one image at a selection rate (0 is dense), on
#: the weak model or the main one, without the `skipped` blocks (given only where some are).
PassCost = Callable[..., float]


@dataclass(frozen=True)
class SamplingCost:
    """Cost of one image."""

    macs: float  # multiply-accumulates of all passes
    evaluations: int  # evaluations of the denoiser (NFE)
    passes: int  # forward passes
    batches: int  # network calls: passes that can be one batch are one

    @property
    def macs_per_evaluation(self) -> float:
        """Mean MACs of one evaluation of the denoiser: listed next to FID in the SG paper."""
        return self.macs / self.evaluations


def sampling_cost(
    objective: Objective, sampler: Sampler, guidance: Guidance, cost: PassCost, depth: int = 0
) -> SamplingCost:
    """Count the MACs of one image from the passes that the guidance makes.

    Args:
        objective: Gives the noise level of each evaluation.
        sampler: Gives the evaluations.
        guidance: Gives the passes.
        cost: MACs of one pass, e.g. `model_cost(model)`.
        depth: Number of blocks; needed for routes that count from the end.
    """
    macs = 0.0
    pass_count = batch_count = 0
    evaluations = sampler.evaluations()
    for step, time in evaluations:
        level = float(objective.level(torch.tensor(time, dtype=torch.float64)))
        passes = guidance.passes(progress_of(step, sampler.steps), level)
        for group in group_passes(passes):
            item = group[0]
            if item.drop:
                # A fused span is the model's route.
                route = guidance.route.resolve(depth) if depth else guidance.route
                pass_macs = cost(item.rate, item.weak, route.sparse_blocks)
            else:
                pass_macs = cost(item.rate, item.weak)
            macs += len(group) * pass_macs
            batch_count += 1
        pass_count += len(passes)
    return SamplingCost(macs, len(evaluations), pass_count, batch_count)


def model_cost(
    model: Any, guidance: Guidance, weak_model: Any = None, attention: bool = True
) -> PassCost:
    """Return the cost of one pass of a `backbones` model, from `backbones.cost`.

    Args:
        model: The network; only its `config` is used.
        guidance: Has the route of sparse passes.
        weak_model: The weaker network, if there is one.
        attention: Count token mixing too; False counts linear layers only, as SG's table does
            (not with skipped blocks: a block's cost is known only as a whole).
    """

    @cache
    def pass_macs(rate: float, weak: bool = False, skipped: tuple[int, ...] = ()) -> float:
        config = model.config
        if weak and weak_model is not None:
            config = weak_model.config
        route = guidance.route.with_rate(rate) if rate > 0 and guidance.route else "none"
        cost = backbone_cost(**config, route=route)
        if not attention:
            if skipped:
                raise ValueError("skipped blocks are counted with attention only")
            return float(cost.macs_routed_no_attention)
        return float(cost.macs_routed - sum(cost.per_block[block] for block in skipped))

    return pass_macs
