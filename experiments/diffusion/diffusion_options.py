"""The options of objectives, samplers and guidance, as frozen dataclasses (no torch here).

Each YAML file below `experiments/conf/{objective,sampler,guidance}` holds one of these. A wrong
value raises `DiffusionError`: one sentence with what is wrong and what to type instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from experiments.diffusion.guidance_options import (
    APGOptions,
    AutoOptions,
    CFGOptions,
    GuidanceOptions,
    ICGOptions,
    IntervalOptions,
    PathDropOptions,
    Rate,
    RoutedOptions,
)
from experiments.diffusion.option_checks import DiffusionError, one_of, positive, require
from routing.errors import suggest

__all__ = [
    "OPTIONS",
    "APGOptions",
    "AutoOptions",
    "CFGOptions",
    "ChurnOptions",
    "DDIMOptions",
    "DDPMOptions",
    "DDPMSamplerOptions",
    "DiffusionError",
    "EDMOptions",
    "EulerOptions",
    "FlowOptions",
    "GuidanceOptions",
    "HeunOptions",
    "ICGOptions",
    "IntervalOptions",
    "PathDropOptions",
    "Rate",
    "RoutedOptions",
    "SDEOptions",
    "SamplerOptions",
    "options_of",
]


# ------------------------------------------------------------------------------------- objectives


@dataclass(frozen=True)
class EDMOptions:
    """EDM (Karras et al. 2022, Table 1, and TREAD's settings)."""

    name: str = "edm"
    p_mean: float = -1.2
    p_std: float = 1.2
    sigma_data: float = 0.5
    sigma_min: float = 0.002
    sigma_max: float = 80.0
    rho: float = 7.0

    def __post_init__(self) -> None:
        for key in ("p_std", "sigma_data", "sigma_min", "rho"):
            positive(f"objective.{key}", getattr(self, key))
        require(
            self.sigma_max > self.sigma_min,
            f"objective.sigma_max={self.sigma_max}: it must exceed sigma_min={self.sigma_min}",
        )


@dataclass(frozen=True)
class FlowOptions:
    """Flow matching as in SiT (Ma et al. 2024), with LightningDiT's extras."""

    TIMES: ClassVar[tuple[str, ...]] = ("lognormal", "uniform")

    name: str = "flow"
    times: str = "lognormal"
    mean: float = 0.0
    std: float = 1.0
    shift: float = 1.0
    cosine: float = 0.0
    time_scale: float = 1000.0
    reverse: bool = False
    sigma_data: float = 1.0

    def __post_init__(self) -> None:
        one_of("objective.times", self.times, self.TIMES)
        for key in ("std", "shift", "time_scale", "sigma_data"):
            positive(f"objective.{key}", getattr(self, key))
        require(self.cosine >= 0, f"objective.cosine={self.cosine}: a weight of 0 or more")


@dataclass(frozen=True)
class DDPMOptions:
    """DDPM as in DiT (Peebles & Xie 2023): linear betas, epsilon, optional learned variance."""

    name: str = "ddpm"
    steps: int = 1000
    beta_start: float = 1e-4
    beta_end: float = 0.02
    learn_sigma: bool = False
    vlb: float = 1.0
    sigma_data: float = 1.0

    def __post_init__(self) -> None:
        require(
            2 <= self.steps <= 10**6,
            f"objective.steps={self.steps}: two or more steps are needed, at most a million",
        )
        require(
            0 < self.beta_start <= self.beta_end < 1,
            f"objective.beta_start={self.beta_start}, beta_end={self.beta_end}: "
            "0 < beta_start <= beta_end < 1 is needed; DiT has 0.0001 and 0.02",
        )
        require(self.vlb >= 0, f"objective.vlb={self.vlb}: a weight of 0 or more is needed")
        positive("objective.sigma_data", self.sigma_data)


# --------------------------------------------------------------------------------------- samplers


@dataclass(frozen=True)
class SamplerOptions:
    """What every sampler has; `steps` intervals from noise to data."""

    name: str = "heun"
    steps: int = 40
    shift: float = 1.0
    reuse: str | None = None
    reuse_every: int = 2

    def __post_init__(self) -> None:
        require(
            isinstance(self.steps, int) and 1 <= self.steps <= 10**5,
            f"sampler.steps={self.steps}: a whole number of 1 or more is needed, at most 100 000",
        )
        positive("sampler.shift", self.shift)
        require(
            self.reuse_every >= 1,
            f"sampler.reuse_every={self.reuse_every}: 1 (never reuse) or more is needed",
        )


@dataclass(frozen=True)
class EulerOptions(SamplerOptions):
    """Euler steps of the probability-flow ODE (order 1, one evaluation a step)."""

    name: str = "euler"
    steps: int = 50


@dataclass(frozen=True)
class HeunOptions(SamplerOptions):
    """Heun steps (order 2); the last is Euler, so `2 * steps - 1` evaluations: 79 for 40."""


@dataclass(frozen=True)
class ChurnOptions(SamplerOptions):
    """EDM's stochastic sampler (Algorithm 2): renoise a little, then a Heun step."""

    name: str = "churn"
    steps: int = 256
    churn: float = 40.0
    churn_min: float = 0.05
    churn_max: float = 50.0
    churn_noise: float = 1.003

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.churn >= 0, f"sampler.churn={self.churn}: a number of 0 or more is needed")
        require(
            0 <= self.churn_min <= self.churn_max,
            f"sampler.churn_min={self.churn_min}, churn_max={self.churn_max}: "
            "0 <= churn_min <= churn_max is needed",
        )


@dataclass(frozen=True)
class SDEOptions(SamplerOptions):
    """Euler-Maruyama on the reverse SDE (SiT section 3.3), the last step without noise."""

    FORMS: ClassVar[tuple[str, ...]] = ("sigma", "constant", "decreasing")
    LAST: ClassVar[tuple[str, ...]] = ("euler", "mean")

    name: str = "sde"
    steps: int = 250
    diffusion: str = "sigma"
    strength: float = 1.0
    last_step: float = 0.04
    last: str = "euler"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("sampler.diffusion", self.diffusion, self.FORMS)
        one_of("sampler.last", self.last, self.LAST)
        require(self.strength >= 0, f"sampler.strength={self.strength}: 0 (the ODE) or more")
        require(
            0 <= self.last_step < 1,
            f"sampler.last_step={self.last_step}: a fraction of 0 or more and below 1 is needed",
        )


@dataclass(frozen=True)
class DDPMSamplerOptions(SamplerOptions):
    """Ancestral sampling (Ho et al. 2020) on evenly spaced times."""

    VARIANCES: ClassVar[tuple[str, ...]] = ("learned", "small", "large")

    name: str = "ddpm"
    steps: int = 250
    variance: str = "learned"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("sampler.variance", self.variance, self.VARIANCES)


@dataclass(frozen=True)
class DDIMOptions(SamplerOptions):
    """DDIM (Song et al. 2021): `eta` 0 is deterministic, 1 is ancestral sampling."""

    name: str = "ddim"
    steps: int = 50
    eta: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.eta <= 1, f"sampler.eta={self.eta}: a number from 0 to 1 is needed")


OPTIONS: dict[str, dict[str, type]] = {
    "objective": {"edm": EDMOptions, "flow": FlowOptions, "ddpm": DDPMOptions},
    "sampler": {
        "euler": EulerOptions,
        "heun": HeunOptions,
        "churn": ChurnOptions,
        "sde": SDEOptions,
        "ddpm": DDPMSamplerOptions,
        "ddim": DDIMOptions,
    },
    "guidance": {
        "none": GuidanceOptions,
        "cfg": CFGOptions,
        "interval": IntervalOptions,
        "routed": RoutedOptions,
        "autoguidance": AutoOptions,
        "apg": APGOptions,
        "icg": ICGOptions,
        "pathdrop": PathDropOptions,
    },
}


def options_of(kind: str, value: Any) -> Any:
    """Return the options dataclass for `value`.

    Args:
        kind: `objective`, `sampler` or `guidance`.
        value: A name, a mapping or dataclass with a `name` (keys left out keep their defaults), or
            `None` for the group's first entry.

    Raises:
        DiffusionError: For an unknown name or key, or a wrong value.
    """
    known = OPTIONS[kind]
    if value is None:
        value = next(iter(known))
    if isinstance(value, str):
        value = {"name": value}
    if isinstance(value, tuple(known.values())):
        return value
    if dataclasses.is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if not isinstance(value, Mapping):
        raise DiffusionError(f"{kind}={value!r}: a name or a mapping with a name is needed")
    name = str(value.get("name", next(iter(known))))
    one_of(kind, name, tuple(known))
    fields = {f.name: f for f in dataclasses.fields(known[name])}
    for key in value:
        if key not in fields:
            raise DiffusionError(
                f"unknown key {kind}.{key} for {kind}={name}{suggest(str(key), fields)}"
            )
    return known[name](**{key: _convert(kind, fields[key], value[key]) for key in value})


def _convert(kind: str, field: dataclasses.Field[Any], value: Any) -> Any:
    """Read numbers that YAML or a command line gave as text, and refuse what is no number."""
    kinds = {"int": int, "float": float, "str": str}
    target = kinds.get(str(field.type).split(" | ")[0])
    if value is None or target is None or isinstance(value, bool) and target is not str:
        return value
    try:
        if target is int and float(value) != int(float(value)):
            raise ValueError
        return target(value)
    except (TypeError, ValueError, OverflowError):
        wanted = {int: "a whole number", float: "a number", str: "text"}[target]
        raise DiffusionError(f"{kind}.{field.name}={value}: {wanted} is needed") from None
