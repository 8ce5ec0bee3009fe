"""Which route a pass outside of training takes: that of a held-out loss, and those of guidance."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from backbones.sizes import parse_size
from experiments.config.schema import Config
from experiments.options.guidance import GuidanceOptions, RoutedOptions, rate_over_steps
from routing.errors import UserError
from routing.route import Route, keep_count

if TYPE_CHECKING:  # both import torch
    from routing.rng import Draws
    from routing.segment import Routing


def routed_pass(config: Config, draws: Draws | None) -> Routing | None:
    """Return what a routed pass of a run's model does outside of training; None for a dense run.

    It takes the run's first route, and its tokens from `draws`.
    """
    if config.routing.off_after == 0:
        return None
    from routing.segment import Routing

    return Routing.from_options(config.routing).on(config.first_route, draws)


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
