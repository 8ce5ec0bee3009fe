"""Diffusion objectives: noise levels, network inputs, regression targets and estimates of `x0`.

All share the Gaussian path `x_t = alpha(time) x0 + sigma(time) noise`; they differ in how times are
sampled and in what the network predicts. Native time, noise level and the network's time input:

| objective | native time | alpha      | sigma          | scale s | u = sigma / s | network time  |
|-----------|-------------|------------|----------------|---------|---------------|---------------|
| edm       | sigma       | 1          | sigma          | 1       | sigma         | ln(sigma) / 4 |
| flow      | t in [0, 1] | 1 - t      | t noise_scale  | 1       | sigma         | 1000 t        |
| ddpm      | step 0..T-1 | sqrt(abar) | sqrt(1 - abar) | alpha   | sigma / alpha | step          |

In `z = x / s` and `u` the probability-flow ODE is `dz/du = (z - D) / u` for all three, so a sampler
is written once. `level = sigma / alpha` is the noise level on which guidance intervals are given.
"""

from __future__ import annotations

from typing import Any

from experiments.diffusion.ddpm import DDPM
from experiments.diffusion.flow import Flow
from experiments.diffusion.objective import EDM, Objective
from experiments.options.objective import OBJECTIVES as OBJECTIVE_OPTIONS
from experiments.options.roles import parse_named

__all__ = ["OBJECTIVES", "Objective", "create_objective"]

OBJECTIVES: dict[str, type[Objective]] = {"edm": EDM, "flow": Flow, "ddpm": DDPM}


def create_objective(options: Any = None) -> Objective:
    """Return the objective that `options` names.

    `options` is a name, or a mapping or dataclass with the keys of `objective.`.
    """
    resolved = parse_named(OBJECTIVE_OPTIONS, "objective", options)
    return OBJECTIVES[resolved.name](resolved)
