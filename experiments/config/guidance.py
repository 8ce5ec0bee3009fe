"""Checks of the routes of guided passes against the run whose model makes them (no torch here)."""

from __future__ import annotations

import dataclasses
from typing import Any

from backbones.sizes import parse_size
from experiments.config.schema import Config
from experiments.options.guidance import GuidanceOptions, RoutedOptions, rate_over_steps
from routing.errors import UserError
from routing.route import keep_count


def check_guidance_routes(config: Config, guidance: GuidanceOptions, model: dict[str, Any]) -> None:
    """Refuse routed guidance whose passes the run's model cannot make; `model` is its arguments."""
    if not isinstance(guidance, RoutedOptions):
        return
    route = guidance.route_of_passes(config.first_route)
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
