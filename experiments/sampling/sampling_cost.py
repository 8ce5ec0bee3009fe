"""What an image costs: multiply-accumulates of every pass that sampler and guidance will make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from experiments.diffusion.guidance import Guidance
from experiments.diffusion.objective import Objective
from experiments.diffusion.samplers import Sampler
from experiments.sampling.block_reuse import plan_reuse
from experiments.sampling.guided import batches, progress_of

#: `cost(rate, weak, skipped)`: MACs of one pass of one image at a selection rate (0 is dense), on
#: the weak model or the main one, without the `skipped` blocks (given only where some are).
PassCost = Callable[..., float]


@dataclass(frozen=True)
class SamplingCost:
    """What one image costs.

    Attributes:
        macs: Multiply-accumulates of all passes of one image.
        per_step: The same for each sampling step.
        evaluations: How often the sampler asks for a denoised image (NFE).
        passes: How many forward passes per image that makes.
        batches: How many calls of a network: passes that can be one batch are one.
    """

    macs: float
    per_step: tuple[float, ...]
    evaluations: int
    passes: int
    batches: int

    @property
    def gmacs_per_evaluation(self) -> float:
        """Mean GMACs of one evaluation: the column beside FID in the SG paper."""
        return self.macs / self.evaluations / 1e9


def sampling_cost(
    objective: Objective, sampler: Sampler, guidance: Guidance, cost: PassCost, depth: int = 0
) -> SamplingCost:
    """Count the MACs of one image from the passes that the guidance will make.

    Args:
        objective: Gives the noise level of each evaluation.
        sampler: Gives the evaluations, and reuse.
        guidance: Gives the passes.
        cost: MACs of one pass, e.g. `model_cost(model)`.
        depth: Number of blocks; needed for reuse, and for routes that count from the end.
    """
    plan = plan_reuse(sampler.options, depth, guidance.sparse)
    per_step, passes, calls = [0.0] * sampler.steps, 0, 0
    evaluations = sampler.evaluations()
    for evaluation, (step, native) in enumerate(evaluations):
        level = float(objective.level(torch.tensor(native, dtype=torch.float64)))
        made = guidance.passes(progress_of(step, sampler.steps), level)
        for group in batches(made):
            first = made[group[0]]
            replay = plan and not first.weak and plan.replays(evaluation, len(group))
            skipped = (plan.blocks,) if plan and replay else ()
            if first.drop:
                # A fused span is the model's route.
                route = guidance.route.resolve(depth) if depth else guidance.route
                skipped = (route.sparse_blocks,)
            per_step[step] += len(group) * cost(first.rate, first.weak, *skipped)
            calls += 1
        passes += len(made)
    return SamplingCost(sum(per_step), tuple(per_step), len(evaluations), passes, calls)


def model_cost(
    model: Any, guidance: Guidance, weak_model: Any = None, attention: bool = True
) -> PassCost:
    """Return the cost of one pass of a `backbones` model, from `backbones.cost`.

    Args:
        model: The network; its `config` is all that is used.
        guidance: Has the route that sparse passes take.
        weak_model: The weaker network, if there is one.
        attention: Count what mixes tokens too; False counts linear layers only, as SG's table does
            (not with reuse: the cost of a block is known as a whole).
    """
    from backbones.cost import cost

    @lru_cache(maxsize=4096)
    def macs(rate: float, weak: bool = False, skipped: tuple[int, ...] = ()) -> float:
        config = (weak_model if weak and weak_model is not None else model).config
        route = guidance.route.with_rate(rate) if rate > 0 and guidance.route else "none"
        found = cost(**config, route=route)
        if skipped and not attention:
            raise ValueError("reuse is counted with attention only")
        total = found.macs_routed if attention else found.macs_routed_no_attention
        return float(total - sum(found.per_block[i] for i in skipped))

    return macs
