"""A trained model together with its objective, sampler and guidance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from experiments.config.guidance import check_guidance_routes
from experiments.config.schema import Config
from experiments.diffusion.guidance import Guidance, create_guidance
from experiments.diffusion.objectives import Objective, create_objective
from experiments.diffusion.samplers import Sampler, create_sampler
from experiments.evaluation.cost import SamplingCost, model_cost, sampling_cost
from experiments.evaluation.generation import generate
from experiments.evaluation.sampling_options import describe_options
from experiments.evaluation.weak_model import load_weak_model
from experiments.runtime.console import big


@dataclass
class SamplingPipeline:
    """Turns seeds and conditions into images."""

    model: Any  # the network
    objective: Objective
    sampler: Sampler
    guidance: Guidance
    weak: Any = None  # the weaker model, if the guidance needs one
    # Called within a batch with its finished share (0 to 1), for a progress display
    batch_progress: Callable[[float], None] | None = None

    @classmethod
    def make(
        cls, model: Any, config: Config, sampler: Any = None, guidance: Any = None
    ) -> SamplingPipeline:
        """Create objective, sampler and guidance; refuse combinations that cannot work.

        Args:
            model: The network with the weights to sample from.
            config: The run it was trained in.
            sampler: Name or options; by default the run's sampler.
            guidance: Name or options; by default the run's guidance.

        Raises:
            UserError: Model, sampler and guidance do not fit together.
        """
        objective = create_objective(config.objective)
        # As in training, but with fixed ends, and no sample leaves the fused span out.
        routing = replace(config.routing, random_end=False, path_drop=0.0)
        guide = create_guidance(guidance or config.guidance, config.first_route, routing)
        weak = None
        checkpoint = getattr(guide.options, "checkpoint", None)
        if guide.options.needs_weak_model and checkpoint is not None:
            device = next(model.parameters()).device
            weak = load_weak_model(checkpoint, config.objective, device)
        guide.check(model, weak)
        guide.options.check_model(null_class_trained=config.train.label_drop > 0)
        check_guidance_routes(config, guide.options, model.config)
        solver = create_sampler(sampler or config.sampler, objective)
        return cls(model, objective, solver, guide, weak)

    def generate(
        self,
        seeds: Tensor,
        labels: Tensor | str | None = "from-seed",
        text: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Generate one image per seed; see `experiments.evaluation.generate`."""
        return generate(
            self.model,
            self.objective,
            self.sampler,
            self.guidance,
            seeds,
            labels,
            text,
            **options,
            weak_model=self.weak,
            batch_progress=self.batch_progress,
        )

    def cost(self, attention: bool = True) -> SamplingCost:
        """Return the cost of one image; without `attention`, that of linear layers only."""
        pass_cost = model_cost(self.model, self.guidance, self.weak, attention)
        return sampling_cost(
            self.objective, self.sampler, self.guidance, pass_cost, self.model.depth
        )

    def lines(self) -> list[str]:
        """Return sampler, guidance and cost as lines for the console."""
        cost, route = self.cost(), self.guidance.route
        guidance = describe_options(self.guidance.options)
        if route:
            guidance += f" route={route}"
        linear = ""
        # With skipped blocks the linear layers alone cannot be counted (see `model_cost`).
        if not any(item.drop for item in self.guidance.guided(0.0)):
            linear_macs = self.cost(attention=False).macs_per_evaluation
            linear = f" (linear layers {big(linear_macs)})"
        return [
            f"sampler   {self.sampler.options.name}, {self.sampler.steps} steps, "
            f"{cost.evaluations} evaluations of objective {self.objective.name}",
            f"guidance  {guidance}: {cost.passes} passes in {cost.batches} batches",
            f"cost      {big(cost.macs)} MACs per image, "
            f"{big(cost.macs_per_evaluation)} per evaluation{linear}",
        ]
