"""Which route a training step or a guided pass takes (no torch until a step is taken)."""

from __future__ import annotations

import dataclasses
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from backbones.cost import Cost
from backbones.sizes import parse_size
from experiments.config.model import run_cost
from experiments.config.schema import Config
from experiments.options.guidance import GuidanceOptions, RoutedOptions, rate_over_steps
from routing.errors import UserError
from routing.route import Route, keep_count

if TYPE_CHECKING:  # both import torch
    from routing.rng import Draws
    from routing.segment import Routing


class TrainingRoutes:
    """The routes of one run over its steps; `model`, if known, are its `model_arguments`."""

    def __init__(self, config: Config, model: dict[str, Any] | None = None) -> None:
        self.config, self.model = config, model
        self.schedule = config.route_schedule
        # The forward MACs of one image on a route: a mean where an end is drawn.
        self.macs = cache(lambda route: float(run_cost(config, model, route).macs_routed))

    @cached_property
    def cost(self) -> Cost:
        """Parameters of the run, and MACs of one image dense and on its `counted_route`."""
        return run_cost(self.config, self.model)

    @cached_property
    def run_routing(self) -> Routing:
        """The run's routing settings, without a route and random numbers, which `on` adds."""
        from routing.segment import Routing

        return Routing.from_options(self.config.routing)


def routed_pass(config: Config, draws: Draws | None) -> Routing | None:
    """Return what a routed pass of a run's model does outside of training; None for a dense run.

    It takes the run's first route, and its tokens from `draws`.
    """
    if config.routing.off_after == 0:
        return None
    return TrainingRoutes(config).run_routing.on(config.first_route, draws)


def guided_route(config: Config, guidance: GuidanceOptions) -> Route:
    """Return the route of a guidance's sparse passes: its own, or the run's first."""
    named = getattr(guidance, "route", None)
    return config.first_route if named is None else Route.parse(named)


def check_guided(config: Config, guidance: GuidanceOptions, model: dict[str, Any]) -> None:
    """Refuse routed guidance whose passes the run's model cannot make; `model` is its arguments."""
    if not isinstance(guidance, RoutedOptions):
        return
    route = guided_route(config, guidance)
    height, width = (side // parse_size(config.size).patch for side in model["input_size"])
    # At scale 1 the strong pass is alone, and with a checkpoint the weak one is another model's.
    alone = guidance.scale == 1 or guidance.checkpoint is not None
    for key in ("strong",) if alone else ("strong", "weak"):
        text = getattr(guidance, key)
        rate = rate_over_steps(text, f"guidance.{key}")
        for share in {rate.at(0.0), rate.largest, rate.at(1.0)}:
            if keep_count(height * width, share) == height * width:
                continue  # a dense pass
            # With the run's own route as first stage: a fused span allows no other route.
            stages = f"{config.first_route}/0.5:{route.with_rate(share)}"
            options = dataclasses.replace(config.routing, schedule="constant")
            try:
                routes = options.schedule_route(stages, config.depth)
                options.check(routes, config.depth, (height, width))
            except UserError as error:
                raise UserError(f"guidance.{key}={text} on route {route}: {error}") from None
