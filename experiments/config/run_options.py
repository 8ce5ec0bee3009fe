"""What the configuration of a run holds: its keys, their types, defaults and comments."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Literal

from annotated_types import Ge, Le

from backbones.validation import Choices
from experiments.data.data_options import TASKS, DataOptions
from experiments.options.evaluation import EvalOptions
from experiments.options.guidance import GuidanceOptions
from experiments.options.model import BackboneOptions
from experiments.options.objective import ObjectiveOptions
from experiments.options.roles import REPORTS, ROUTES, SCORES
from experiments.options.sampler import SamplerOptions
from experiments.options.training import ENCODERS, SELF_ENCODER, PathsOptions, TrainOptions
from routing import Route, RouteSchedule, RoutingOptions

TRACKERS = ("none", "tensorboard", "wandb", "trackio")


@dataclass(frozen=True)
class RunOptions:
    """The keys of a run."""

    backbone: BackboneOptions
    data: DataOptions
    objective: ObjectiveOptions
    sampler: Annotated[SamplerOptions, SCORES]
    guidance: Annotated[GuidanceOptions, SCORES]
    eval: Annotated[EvalOptions, SCORES]
    seed: Annotated[
        int, Ge(0), Le(2**31 - 1), "Seed of initial weights, data order, noise and routes."
    ] = 0
    scale: Annotated[str, REPORTS] = "tiny"
    experiment: Annotated[str | None, REPORTS] = None
    size: Annotated[
        str, "Width, depth and patch: T, M, S, B, L or XL, a slash, the patch. Set by scale."
    ] = "T/1"
    route: Annotated[
        str,
        ROUTES,
        "Blocks that a random part of the tokens skips in training: none, 2-8, 2-8@0.75, auto, "
        "2--4, '0-4+6-9'.",
    ] = "none"
    task: Annotated[
        str, Choices(TASKS), "What the model is conditioned on: class, text or none."
    ] = "class"
    init: Annotated[
        str | None,
        "Start from the EMA weights of another run, with a fresh optimizer: RUN or RUN@STEP.",
    ] = None
    routing: Annotated[RoutingOptions, ROUTES] = field(default_factory=RoutingOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    log: Annotated[
        str, Choices(TRACKERS), REPORTS, "Experiment tracker, beside the files of the run folder."
    ] = "none"
    dry: Annotated[
        bool | Literal["full"],
        REPORTS,
        "Print model, cost, memory and run folder, check what the run would check, train nothing "
        "(also --dry-run). full: also build the model, name its kernels and time a step.",
    ] = False
    paths: Annotated[PathsOptions, REPORTS] = field(default_factory=PathsOptions)

    @property
    def depth(self) -> int:
        """Number of blocks of the backbone."""
        return self.backbone.shape(self.size).depth

    @property
    def width(self) -> int:
        """Width of the backbone."""
        return self.backbone.shape(self.size).width

    @property
    def encoder_width(self) -> int:
        """Width of the features that `train.encoder` names."""
        encoder = self.train.encoder
        return self.width if encoder == SELF_ENCODER else ENCODERS[encoder]

    @cached_property
    def route_schedule(self) -> RouteSchedule:
        """The routes with absolute block indices, and the factor of their rates."""
        name = f"{self.backbone.name}-{self.size}"
        return self.routing.schedule_route(self.route, self.depth, name)

    @property
    def first_route(self) -> Route:
        """The first resolved route that is not `none`: that of a fused span and routed guidance."""
        return self.route_schedule.first

    @property
    def resolved_route(self) -> str:
        """The route with absolute block indices, as in the run's name."""
        return str(self.route_schedule)
