"""How a trained model is sampled: objective, sampler, guidance, a weaker model, and the cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from experiments.diffusion.diffusion_options import DiffusionError
from experiments.diffusion.guidance import Guidance, create_guidance
from experiments.diffusion.objective import Objective, create_objective
from experiments.diffusion.samplers import Sampler, create_sampler
from experiments.sampling.block_reuse import plan_reuse
from experiments.sampling.generation import generate
from experiments.sampling.sampling_cost import SamplingCost, model_cost, sampling_cost

if TYPE_CHECKING:
    from experiments.training.checkpoint import TrainedModel

#: Images on which the error of reuse is measured.
PROBES = 8


@dataclass
class Setup:
    """Everything that sampling needs beside seeds and labels.

    Attributes:
        loaded: The model, its run's configuration and where it came from.
        objective: What it was trained on.
        sampler: How to walk.
        guidance: How to guide.
        weak: The weaker model, if guidance has one.
    """

    loaded: TrainedModel
    objective: Objective
    sampler: Sampler
    guidance: Guidance
    weak: Any = None

    @classmethod
    def make(cls, loaded: TrainedModel, sampler: Any, guidance: Any) -> Setup:
        """Build the parts and refuse combinations that this run cannot have.

        Args:
            loaded: From `experiments.training.checkpoint.load_model`.
            sampler: Options of the sampler.
            guidance: Options of the guidance.

        Raises:
            DiffusionError: In one sentence, with what to use instead.
        """
        from experiments.training.routes import first_route
        from routing.selection import Selection

        config, model = loaded.config, loaded.model
        objective = create_objective(config.objective)
        routing = config.routing
        guide = create_guidance(
            guidance,
            route=first_route(config),
            selection=Selection(routing.selection, shared=routing.shared, block=routing.block),
            reinsert=routing.reinsert,
            remove=routing.remove,
        )
        weak = None
        checkpoint = getattr(guide.options, "checkpoint", None)
        if guide.needs_weak and checkpoint is not None:
            weak = load_weak(checkpoint, next(model.parameters()).device)
        guide.check(model, weak)
        if "null" in guide.labels and config.train.label_drop == 0:
            raise DiffusionError(
                f"guidance={guide.name} needs the null class, which this run never saw "
                "(train.label_drop=0); use guidance=icg, routed or none"
            )
        walk = create_sampler(sampler, objective)
        if plan_reuse(walk.options, model.depth, guide.sparse) is not None:
            _check_reuse(model, walk.options.reuse)
        return cls(loaded, objective, walk, guide, weak)

    def cost(self, attention: bool = True) -> SamplingCost:
        """Return what one image costs."""
        passes = model_cost(self.loaded.model, self.guidance, self.weak, attention)
        depth = self.loaded.model.depth
        return sampling_cost(self.objective, self.sampler, self.guidance, passes, depth)

    def lines(self) -> list[str]:
        """Return what will be done, in lines for people."""
        cost = self.cost()
        reused = self.sampler.options.reuse not in (None, "none")
        linear = None if reused else self.cost(attention=False).gmacs_per_evaluation
        lines = [
            f"sampler   {self.sampler.name}, {self.sampler.steps} steps, "
            f"{cost.evaluations} evaluations of objective {self.objective.name}",
            f"guidance  {said(self.guidance)}: {cost.passes} passes in {cost.batches} batches",
            f"cost      {cost.macs / 1e9:.4g} GMACs an image, "
            f"{cost.gmacs_per_evaluation:.4g} an evaluation"
            + ("" if linear is None else f" ({linear:.4g} counting linear layers only)"),
        ]
        if reused:
            error, share = self.reuse_error()
            lines.append(
                f"reuse     blocks {self.sampler.options.reuse} run in one of "
                f"{self.sampler.options.reuse_every} evaluations: {share:.0%} of the MACs, images "
                f"differ by {error:.2%} (relative root mean square, {PROBES} images)"
            )
        return lines

    def reuse_error(self) -> tuple[float, float]:
        """Return how far images with reuse are from those without, and their share of the MACs."""
        options = asdict(self.sampler.options) | {"reuse": None}
        plain = create_sampler(options, self.objective)
        model, seeds = self.loaded.model, torch.arange(PROBES)
        parts = (self.guidance, seeds)
        exact, reused = (
            generate(model, self.objective, s, *parts, weak_model=self.weak)
            for s in (plain, self.sampler)
        )
        error = (reused - exact).square().mean().sqrt() / exact.square().mean().sqrt()
        passes = model_cost(model, self.guidance, self.weak)
        full = sampling_cost(self.objective, plain, self.guidance, passes).macs
        return float(error), self.cost().macs / full

    def identity(self, weights: str, captions: list[str] | None) -> dict[str, Any]:
        """Return what identifies the samples beside the options of the parts, JSON-able."""
        from experiments.runtime.files import sha256

        source = self.loaded.source
        digest = sha256(source) if source.endswith(".safetensors") else source
        data = self.loaded.info.get("fingerprint")
        return {
            "weights": [digest, self.loaded.step, weights],
            "data": data,
            "captions": captions,
        }


def _check_reuse(model: Any, blocks: str | None) -> None:
    if any(getattr(block, "carries", ()) for block in model.stack.blocks):
        raise DiffusionError(
            f"sampler.reuse={blocks}: blocks of backbone={model.name} hand values to later blocks, "
            "which skipped ones would not; use sampler.reuse=null"
        )


def load_weak(checkpoint: str, device: torch.device) -> Any:
    """Return the model that `RUN@STEP`, a run or a file names."""
    from experiments.config.parent import split
    from experiments.training.checkpoint import load_model

    path, step = split(checkpoint)
    return load_model(path, step=step, device=device).model


def said(guidance: Guidance) -> str:
    """Return a guidance and its main options in words."""
    options = asdict(guidance.options)
    name = options.pop("name")
    if name == "none":
        return name
    shown = {key: value for key, value in options.items() if value not in (None, False)}
    if shown.get("low") == 0:
        shown.pop("low")
    if guidance.route:
        shown["route"] = str(guidance.route)
    return " ".join([name, *(f"{key}={value}" for key, value in shown.items())])
