"""How a trained model is sampled: objective, sampler, guidance, a weaker model, and the cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from backbones.cost import cost as backbone_cost
from experiments.config.parent import split
from experiments.config.removed_keys import without_removed
from experiments.config.routes import check_guided, first_route
from experiments.config.schema import Config
from experiments.diffusion.guidance import Guidance, create_guidance
from experiments.diffusion.objective import Objective, create_objective
from experiments.diffusion.samplers import Sampler, create_sampler
from experiments.evaluation.generation import batches, generate, progress_of
from experiments.evaluation.trained_model import load_model
from experiments.options.diffusion import DiffusionError, check_weights, options_of
from experiments.runtime.parsing import Malformed, yaml_of
from routing.errors import suggest
from routing.selection import Selection

#: `cost(rate, weak, skipped)`: MACs of one pass of one image at a selection rate (0 is dense), on
#: the weak model or the main one, without the `skipped` blocks (given only where some are).
PassCost = Callable[..., float]


@dataclass(frozen=True)
class SamplingCost:
    """What one image costs."""

    macs: float  # multiply-accumulates of all passes of one image
    evaluations: int  # how often the sampler asks for a denoised image (NFE)
    passes: int  # how many forward passes per image that makes
    batches: int  # how many calls of a network: passes that can be one batch are one

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
        sampler: Gives the evaluations.
        guidance: Gives the passes.
        cost: MACs of one pass, e.g. `model_cost(model)`.
        depth: Number of blocks; needed for routes that count from the end.
    """
    macs, passes, calls = 0.0, 0, 0
    evaluations = sampler.evaluations()
    for step, native in evaluations:
        level = float(objective.level(torch.tensor(native, dtype=torch.float64)))
        made = guidance.passes(progress_of(step, sampler.steps), level)
        for group in batches(made):
            first = group[0]
            skipped: tuple[tuple[int, ...], ...] = ()
            if first.drop:
                # A fused span is the model's route.
                route = guidance.route.resolve(depth) if depth else guidance.route
                skipped = (route.sparse_blocks,)
            macs += len(group) * cost(first.rate, first.weak, *skipped)
            calls += 1
        passes += len(made)
    return SamplingCost(macs, len(evaluations), passes, calls)


def model_cost(
    model: Any, guidance: Guidance, weak_model: Any = None, attention: bool = True
) -> PassCost:
    """Return the cost of one pass of a `backbones` model, from `backbones.cost`.

    Args:
        model: The network; its `config` is all that is used.
        guidance: Has the route that sparse passes take.
        weak_model: The weaker network, if there is one.
        attention: Count what mixes tokens too; False counts linear layers only, as SG's table does
            (not with skipped blocks: the cost of a block is known as a whole).
    """

    @lru_cache(maxsize=4096)
    def macs(rate: float, weak: bool = False, skipped: tuple[int, ...] = ()) -> float:
        config = (weak_model if weak and weak_model is not None else model).config
        route = guidance.route.with_rate(rate) if rate > 0 and guidance.route else "none"
        found = backbone_cost(**config, route=route)
        if skipped and not attention:
            raise ValueError("skipped blocks are counted with attention only")
        total = found.macs_routed if attention else found.macs_routed_no_attention
        return float(total - sum(found.per_block[i] for i in skipped))

    return macs


@dataclass
class SamplingPipeline:
    """A model with everything that turns seeds and conditions into images."""

    model: Any  # the network
    objective: Objective  # what it was trained on
    sampler: Sampler  # how to integrate from noise to data
    guidance: Guidance  # how to guide
    weak: Any = None  # the weaker model, if guidance has one

    @classmethod
    def make(
        cls, model: Any, config: Config, sampler: Any = None, guidance: Any = None
    ) -> SamplingPipeline:
        """Build the parts and refuse combinations that this run cannot have.

        Args:
            model: The network with the weights to sample from.
            config: The run it was trained in.
            sampler: Name or options in place of the run's own sampler.
            guidance: Name or options in place of the run's own guidance.

        Raises:
            DiffusionError: In one sentence, with what to use instead.
        """
        objective, routing = create_objective(config.objective), config.routing
        guide = create_guidance(
            guidance or config.guidance,
            route=first_route(config),
            selection=Selection(routing.selection, shared=routing.shared, block=routing.block),
            reinsert=routing.reinsert,
            remove=routing.remove,
        )
        weak = None
        checkpoint = getattr(guide.options, "checkpoint", None)
        if guide.options.needs_weak and checkpoint is not None:
            path, step = split(checkpoint, "guidance.checkpoint=")
            parent = load_model(path, step=step, device=next(model.parameters()).device)
            key = f"guidance.checkpoint={checkpoint}"
            check_weights(key, parent.config.objective, config.objective)
            weak = parent.model
        guide.check(model, weak)
        guide.options.check(null_seen=config.train.label_drop > 0)
        check_guided(config, guide.options, model.config)
        solver = create_sampler(sampler or config.sampler, objective)
        return cls(model, objective, solver, guide, weak)

    def generate(
        self,
        seeds: Tensor,
        labels: Tensor | str | None = "from-seed",
        text: Tensor | None = None,
        **how: Any,
    ) -> Tensor:
        """Generate one image per seed; see `experiments.evaluation.generate`."""
        parts = (self.model, self.objective, self.sampler, self.guidance)
        return generate(*parts, seeds, labels, text, **how, weak_model=self.weak)

    def cost(self, attention: bool = True) -> SamplingCost:
        """Return what one image costs."""
        passes = model_cost(self.model, self.guidance, self.weak, attention)
        parts = (self.objective, self.sampler, self.guidance)
        return sampling_cost(*parts, passes, self.model.depth)

    def lines(self) -> list[str]:
        """Return what will be done, in lines for people."""
        cost, route = self.cost(), self.guidance.route
        guidance = described(self.guidance.options) + (f" route={route}" if route else "")
        # Without some blocks only the whole of the others is known, attention included.
        whole = not any(p.drop for p in self.guidance.guided(0.0))
        linear = self.cost(attention=False).gmacs_per_evaluation if whole else None
        return [
            f"sampler   {self.sampler.options.name}, {self.sampler.steps} steps, "
            f"{cost.evaluations} evaluations of objective {self.objective.name}",
            f"guidance  {guidance}: {cost.passes} passes in {cost.batches} batches",
            f"cost      {cost.macs / 1e9:.4g} GMACs an image, "
            f"{cost.gmacs_per_evaluation:.4g} an evaluation"
            + ("" if linear is None else f" ({linear:.4g} counting linear layers only)"),
        ]


def described(options: Any) -> str:
    """Return an options dataclass as `name key=value ...`, leaving out what has its default."""
    changed = [
        f"{f.name}={getattr(options, f.name)}"
        for f in fields(options)
        if f.name != "name"
        and (f.name in ("steps", "scale") or getattr(options, f.name) != f.default)
    ]
    return " ".join([options.name, *changed])


# --- from words to options ----------------------------------------------------------------------


#: Groups of a run's configuration that may be changed for sampling: `guidance.scale=2`.
GROUPS = ("sampler", "guidance", "data")
#: Flags that mean such a key.
FLAGS = {"steps": "sampler.steps", "scale": "guidance.scale"}
FLAGS |= {"sampler": "sampler.name", "guidance": "guidance.name"}


def parse_overrides(items: Sequence[str], **flags: Any) -> dict[str, dict[str, Any]]:
    """Read `guidance.scale=2` and the like into a mapping per group.

    `flags` are the values of some of `FLAGS`; None is not given.
    """
    found: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    given = [f"{FLAGS[name]}={value}" for name, value in flags.items() if value is not None]
    for item in [*items, *given]:
        key, equals, value = item.partition("=")
        group, dot, name = key.partition(".")
        if group not in GROUPS or not dot or not equals:
            hint = "" if group in GROUPS else suggest(group, GROUPS)
            if key in FLAGS:
                hint = f"; type --{key} {value}"
            elif not (equals or dot):
                hint = "; a list is one word, such as 3,7"
            raise DiffusionError(
                f"{item}: sampling can change {', '.join(f'{g}.KEY=VALUE' for g in GROUPS)}{hint}"
            )
        if name in found[group]:
            raise DiffusionError(f"{key} is given twice, also as {value}; give one of the two")
        try:
            found[group][name] = yaml_of(value, item)
        except Malformed:
            found[group][name] = value  # a path, such as one that begins with a bracket
    return without_removed(found)


def chosen_options(kind: str, configured: Mapping[str, Any], changes: Mapping[str, Any]) -> Any:
    """Return a group's options: the run's own, or those by default of another name, changed."""
    same = changes.get("name", configured.get("name")) == configured.get("name")
    options = options_of(kind, {**(configured if same else {}), **changes})
    if options.name == "none" and changes.get("scale") is not None and options.scale != 1:
        raise DiffusionError(f"scale {options.scale:g}: there is no guidance; add --guidance cfg")
    return options
