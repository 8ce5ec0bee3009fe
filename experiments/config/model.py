"""The model of a run: its arguments, what it costs, and the route that both refer to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from backbones.cost import Cost, cost, features_macs
from backbones.registry import model_config
from backbones.sizes import AlignOptions
from backbones.validation import show
from experiments.config.schema import Config
from experiments.options.model import BackboneOptions
from experiments.options.training import SELF_ENCODER
from experiments.runtime.console import big
from routing.errors import require
from routing.route import Route, Segment


def counted_route(config: Config) -> Route:
    """Return the route that the banner and the costs refer to: the first, none if never routed."""
    if config.routing.off_after == 0:
        # Though the model has what a routed one has: SPRINT's dense fine-tune.
        return Route()
    route, factor = config.first_route, config.route_schedule.factor
    return route.scaled(factor.largest) if factor.kind == "constant" else route


def model_arguments(config: Config, info: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `backbones.create` for a run on data with this `info`."""
    require(
        config.task != "class" or info["num_classes"],
        f"task=class: data={info['name']} has no classes; type task=none",
    )
    require(
        config.task != "text" or info["text"],
        f"task=text: data={info['name']} has no captions; type task=class or data=scenes",
    )
    channels, height, width = info["shape"]
    return {
        **config.backbone.arguments(),
        "size": config.size,
        "in_channels": channels,
        "input_size": [height, width],
        "num_classes": info["num_classes"] if config.task == "class" else 0,
        "text": info["text"] if config.task == "text" else None,
        "learn_sigma": config.objective.learns_variance,
        **learned_parts(config),
    }


def learned_parts(config: Config) -> dict[str, Any]:
    """Return the arguments of what a variant adds: SPRINT's fusion, REPA's or SRA's projector."""
    arguments: dict[str, Any] = {}
    if config.routing.learned == "fuse":
        arguments["fuse"] = str(config.first_route)
    if config.train.encoder != "none" and config.backbone.align is None:
        # REPA aligns its eighth block of 24 or 28, and the fourth of 12.
        arguments["align"] = {
            "block": max(0, min(8, config.depth // 3) - 1),
            "channels": config.encoder_width,
            "hidden": min(2048, 4 * config.width),
        }
    return arguments


def run_cost(
    config: Config, model: dict[str, Any] | None = None, route: Route | None = None
) -> Cost:
    """Return `backbones.cost.cost` for a run; with a drawn end the routed MACs are a mean.

    SRA's teacher (`train.encoder=ema`) is part of each pass: its MACs are in all four counts.

    `model` are its `model_arguments`, worked out if not given; `route` is a resolved one, the run's
    `counted_route` if not given.
    """
    options = config.routing
    arguments = model_arguments(config, config.data.describe()) if model is None else model
    route = counted_route(config) if route is None else route
    counted = partial(cost, **arguments, reinsert=options.reinsert, remove=options.remove)
    plain = counted(route=route)
    full = plain
    if config.train.encoder == SELF_ENCODER:
        full = _with_teacher(config, plain, arguments)
    if not options.random_end or not route:
        return full
    # Segments save independently of each other, and every end is as likely.
    ends = [
        (counted(route=Route((Segment(s.start, end, s.rate),))), s.end - s.start + 1)
        for s in route.segments
        for end in range(s.start, s.end + 1)
    ]
    means = {}
    for kind in ("", "_no_attention"):
        dense = getattr(plain, f"macs_dense{kind}")
        saved = sum((dense - getattr(one, f"macs_routed{kind}")) / count for one, count in ends)
        means[f"macs_routed{kind}"] = round(getattr(full, f"macs_dense{kind}") - saved)
    return dataclasses.replace(full, **means)


def route_macs(config: Config, model: dict[str, Any] | None = None) -> Callable[[Route], float]:
    """Return a function of the forward MACs of one image on a route (cached)."""
    return cache(lambda route: float(run_cost(config, model, route).macs_routed))


def teacher_block(config: Config) -> int:
    """Return the block of the EMA whose output SRA aligns to: the eighth of 12 unless set."""
    block = config.train.teacher_block
    return max(0, 2 * config.depth // 3 - 1) if block is None else block


def _with_teacher(config: Config, cost: Cost, arguments: dict[str, Any]) -> Cost:
    """Add the forward pass of SRA's teacher, dense up to its block, to the MACs of every pass."""
    model = model_config(**arguments)
    counts = {}
    for kind in ("", "_no_attention"):
        macs = features_macs(
            model, teacher_block(config), mixing=kind == "", to_the_end=model.fuse is not None
        )
        for state in ("dense", "routed"):
            name = f"macs_{state}{kind}"
            counts[name] = getattr(cost, name) + macs
    return dataclasses.replace(cost, **counts)


def banner_lines(config: Config, cost: Cost, kernels: Sequence[str]) -> list[str]:
    """Return the lines that describe a model and its route (see the README's picture)."""
    route = counted_route(config)
    name = f"{config.backbone.name}-{config.size}"
    flops, tokens = f"{big(cost.macs_dense)} MACs per image", str(max(cost.tokens))
    blocks = route.ruler(config.depth)
    if route:
        share = 1 - cost.macs_routed / cost.macs_dense
        flops += f" dense -> {big(cost.macs_routed)} routed (-{share:.0%})"
        blocks += "   (routed in brackets)"
        inside = dict.fromkeys(str(cost.tokens[i]) for i in route.sparse_blocks)
        tokens += f" -> {' and '.join(inside)} in routed blocks"
        tokens += f" ({config.routing.selection} selection)"
    kernels = [f"kernel      {line}" for line in kernels]
    if config.train.encoder != "none":
        kernels.append(_alignment_line(config))
    if config.train.loss == "ensemble" and (not route or config.routing.reinsert == "none"):
        kernels.append("loss        plain: no tokens skip and come back, for train.loss=ensemble")
    return [
        f"model       {name}, {big(cost.params)} parameters, route {config.resolved_route}",
        *_options_lines(config.backbone),
        f"cost        {flops}",
        f"blocks      {blocks}",
        f"tokens      {tokens}",
        *kernels,
    ]


def _options_lines(backbone: BackboneOptions) -> list[str]:
    """Return the line on the family's options that are not at their defaults; none without any."""
    changes = []
    for field in dataclasses.fields(backbone.family):
        value = getattr(backbone.family, field.name)
        if value != field.default:
            changes.append(f"{field.name}={show(value)}")
    return [f"backbone    {', '.join(changes)}"] if changes else []


def _alignment_line(config: Config) -> str:
    """Return the line that describes the loss of REPA or SRA."""
    align = config.backbone.align or AlignOptions(**learned_parts(config)["align"])
    block, weight = align.block, config.train.align_weight
    if config.train.encoder == SELF_ENCODER:
        teacher = teacher_block(config)
        return (
            f"SRA         block {block} to block {teacher} of the EMA, weight {weight:g}; its "
            "dense pass is in the MACs"
        )
    encoder = config.train.encoder
    return f"REPA        block {block} to features of encoder {encoder!r}, weight {weight:g}"
