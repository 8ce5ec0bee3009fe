"""Guidance: which passes one evaluation makes (class, null class, routed) and how they combine.

A guidance is two pure functions: `passes(progress, level)` names the passes (which model,
which label, which selection rate), `combine` mixes their predictions. `GuidedDenoiser` runs the
passes; those that differ only in the label share a batch. Costs follow from `passes` alone.

With `D_s` the strong and `D_w` the weak prediction, all but APG return `w D_s + (1 - w) D_w`: CFG
(Ho & Salimans 2022, Equation 6, with w = 1 + theirs), autoguidance and Sparse Guidance alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from experiments.options.guidance import (
    GUIDANCE,
    APGOptions,
    GuidanceOptions,
    PathDropOptions,
    rate_over_steps,
)
from experiments.options.roles import ConfigError, parse_named
from routing.errors import require
from routing.options import RoutingOptions
from routing.route import Route


@dataclass(frozen=True)
class Pass:
    """One pass through a network."""

    # `given` (the condition), `null` (the null class or text) or `random` (another one)
    label: str = "given"
    rate: float = 0.0  # fraction of tokens that skip the route; 0 is a dense pass
    weak: bool = False  # whether the weaker checkpoint runs it
    drop: bool = False  # whether it leaves out the blocks of a fused span (SPRINT)


class Guidance:
    """A dense conditional pass, guided away from the weak pass of the options. Base of all others.

    The weak pass has another label (CFG, ICG), runs a weaker checkpoint (autoguidance), leaves out
    the blocks of a fused span (SPRINT) or has another selection rate (routed guidance, where the
    label is the null class's if `null_class` is set). If it does not differ, there is no guidance.
    """

    def __init__(self, options: GuidanceOptions) -> None:
        self.options = options
        dropping = isinstance(options, PathDropOptions)
        self.sparse = options.sparse
        self.weak_pass = Pass(options.weak_label, weak=options.needs_weak_model, drop=dropping)
        #: Selection rates of both passes over the sampling steps.
        self.rates = [
            rate_over_steps(getattr(options, key, "0"), f"guidance.{key}")
            for key in ("strong", "weak")
        ]
        #: Route and routing options of passes with a rate.
        self.route = Route()
        self.routing = RoutingOptions()

    def passes(self, progress: float, level: float) -> list[Pass]:
        """Return the passes of one evaluation; the first one is used alone where guidance is off.

        `progress` is 0 at the first sampling step and 1 at the last, `level` is sigma / alpha.
        """
        passes = self.guided(progress)
        return passes if self.active(level) else passes[:1]

    def active(self, level: float) -> bool:
        """Return whether guidance acts: low < level <= high, and the scale is not 1."""
        o = self.options
        return o.scale != 1.0 and o.low < level and (o.high is None or level <= o.high)

    def guided(self, progress: float) -> list[Pass]:
        """Return the passes where guidance acts: the strong one, then the weak one if any."""
        strong, weak = (rate.at(progress) for rate in self.rates)
        passes = [Pass(rate=strong), replace(self.weak_pass, rate=weak)]
        unguided = self.weak_pass == Pass() and not self.sparse
        return passes[:1] if unguided else passes

    def combine(self, outputs: list[Tensor], memory: dict[str, Tensor]) -> Tensor:
        """Mix the denoised images of the passes, one `(B, C, H, W)` each.

        `memory` holds state between the evaluations of one batch (APG's momentum).
        """
        if len(outputs) == 1:
            return outputs[0]
        strong, weak = outputs
        mixed = weak + self.options.scale * (strong - weak)
        channels = getattr(self.options, "channels", None)
        if channels is None:
            return mixed
        # CFG of the first channels only: the rest stay conditional.
        return torch.cat([mixed[:, :channels], strong[:, channels:]], dim=1)

    def check(self, model: Any, weak_model: Any = None) -> None:
        """Check that the model supports this guidance.

        Raises:
            ConfigError: It does not; the message says what to use instead.
        """
        model_config = getattr(model, "config", {})
        self.options.check_model(
            conditional=bool(getattr(model, "num_classes", 0)) or has_text(model),
            fused=getattr(getattr(model, "stack", None), "fuse", None) is not None,
            weak_model=weak_model is not None,
            channels=model_config.get("in_channels", math.inf),
        )
        if not self.options.needs_weak_model:
            return
        for key in ("in_channels", "input_size", "num_classes", "text"):
            weak_value, value = weak_model.config.get(key), model_config.get(key)
            require(
                weak_value == value,
                f"guidance.checkpoint has another {key} than the model ({weak_value}, not "
                f"{value}); take one of the same data",
                ConfigError,
            )


class APG(Guidance):
    """Adaptive projected guidance: CFG's difference with momentum, a norm limit, and projection.

    Sadat et al. 2024, Algorithm 1: the part of the difference parallel to the conditional
    prediction saturates images; it is scaled by `eta`, and the orthogonal part does the guiding.
    """

    options: APGOptions

    def combine(self, outputs: list[Tensor], memory: dict[str, Tensor]) -> Tensor:
        """Return `D_c + (w - 1) (orthogonal + eta * parallel)`."""
        if len(outputs) == 1:
            return outputs[0]
        conditional, unconditional = outputs
        difference = conditional - unconditional
        if self.options.momentum:
            if "average" in memory:
                difference = difference + self.options.momentum * memory["average"]
            memory["average"] = difference
        dims = tuple(range(1, conditional.ndim))
        if self.options.threshold:
            norm = torch.linalg.vector_norm(difference, dim=dims, keepdim=True)
            limit = torch.full_like(norm, self.options.threshold)
            difference = difference * (limit / norm.clamp(min=1e-12)).clamp(max=1)
        square = (conditional * conditional).sum(dims, keepdim=True).clamp(min=1e-12)
        parallel = (difference * conditional).sum(dims, keepdim=True) / square * conditional
        orthogonal = difference - parallel
        update = orthogonal + self.options.eta * parallel
        return conditional + (self.options.scale - 1) * update


def has_text(model: Any) -> bool:
    """Return whether the model is conditioned on text."""
    return bool((getattr(model, "config", None) or {}).get("text"))


def create_guidance(
    options: Any = None, route: Any = None, routing: RoutingOptions | None = None
) -> Guidance:
    """Return the guidance that `options` names.

    Args:
        options: A name, a mapping or dataclass with the keys of `guidance.`.
        route: The route the model was trained with (text or `routing.Route`); routed guidance
            uses it unless `guidance.route` names another.
        routing: Options of passes with a route: which tokens stay, and how the others return.

    Raises:
        ConfigError: If routed guidance has no route.
    """
    resolved = parse_named(GUIDANCE, "guidance", options)
    guidance = APG(resolved) if resolved.name == "apg" else Guidance(resolved)
    if guidance.sparse:
        guidance.route = resolved.route_of_passes(route)
        resolved.check_model(routed=bool(guidance.route))
    guidance.routing = routing or RoutingOptions()
    return guidance
