"""The options of objectives, samplers and guidance, as frozen dataclasses (no torch here).

Each YAML file below `experiments/conf/{objective,sampler,guidance}` holds one of these. A wrong
value raises `DiffusionError`: one sentence with what is wrong and what to type instead.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from routing.errors import UserError, suggest


class DiffusionError(UserError):
    """A setting of an objective, a sampler or a guidance that cannot work."""


def require(ok: bool, message: str) -> None:
    """Raise `DiffusionError` with `message` unless `ok`."""
    if not ok:
        raise DiffusionError(message)


def one_of(key: str, value: str, options: tuple[str, ...]) -> None:
    """Refuse a value that is not among `options`, with the closest one."""
    hint = suggest(value, options)
    require(value in options, f"{key}={value}: choose one of {', '.join(options)}{hint}")


def positive(key: str, value: float) -> None:
    """Refuse what is no finite number above 0."""
    require(
        isinstance(value, int | float) and math.isfinite(value) and value > 0,
        f"{key}={value}: a positive number is needed",
    )


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
            type(self.steps) is int and 1 <= self.steps <= 10**5,
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


# ---------------------------------------------------------------------------------------- guidance


@dataclass(frozen=True)
class GuidanceOptions:
    """What every guidance has: its scale, and the noise levels (sigma / alpha) where it acts."""

    name: str = "none"
    scale: float = 1.0
    low: float = 0.0
    high: float | None = None

    def __post_init__(self) -> None:
        require(
            isinstance(self.scale, int | float) and math.isfinite(self.scale),
            f"guidance.scale={self.scale}: a number is needed; 1 is no guidance",
        )
        require(
            0 <= self.low < (math.inf if self.high is None else self.high),
            f"guidance.low={self.low}, high={self.high}: 0 <= low < high is needed (in sigma)",
        )


@dataclass(frozen=True)
class CFGOptions(GuidanceOptions):
    """Classifier-free guidance (Ho & Salimans 2022): `D = null + scale * (cond - null)`.

    `channels` guides the first so many alone and leaves the others conditional: 3 in the published
    sampling of DiT, SiT and LightningDiT, whatever their latents have.
    """

    name: str = "cfg"
    scale: float = 1.5
    channels: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.channels is None or self.channels >= 1,
            f"guidance.channels={self.channels}: null (all) or a number of 1 or more is needed; "
            "3 is that of DiT's and SiT's sampling",
        )


@dataclass(frozen=True)
class IntervalOptions(CFGOptions):
    """CFG at a limited interval of noise levels only (Kynkaanniemi et al. 2024)."""

    name: str = "interval"
    scale: float = 2.1
    low: float = 0.28
    high: float | None = 2.9


@dataclass(frozen=True)
class RoutedOptions(GuidanceOptions):
    """Routed guidance (Sparse Guidance, arXiv 2601.01608): two conditional passes, two rates."""

    SUBSETS: ClassVar[tuple[str, ...]] = ("independent", "nested")

    name: str = "routed"
    scale: float = 1.5
    strong: str = "0.5"
    weak: str = "0.9"
    null_class: bool = False
    subsets: str = "independent"
    route: str | None = None
    checkpoint: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("guidance.subsets", self.subsets, self.SUBSETS)
        Rate.parse(self.strong, "guidance.strong")
        Rate.parse(self.weak, "guidance.weak")


@dataclass(frozen=True)
class AutoOptions(GuidanceOptions):
    """Autoguidance (Karras et al. 2024): away from a weaker checkpoint, both conditional."""

    name: str = "autoguidance"
    scale: float = 1.5
    checkpoint: str | None = None


@dataclass(frozen=True)
class APGOptions(GuidanceOptions):
    """Adaptive projected guidance (Sadat et al. 2024)."""

    name: str = "apg"
    scale: float = 4.0
    eta: float = 0.0
    threshold: float = 2.5
    momentum: float = -0.75

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.threshold >= 0, f"guidance.threshold={self.threshold}: 0 (no limit) or more")
        require(
            -1 < self.momentum < 1,
            f"guidance.momentum={self.momentum}: a number between -1 and 1 is needed; 0 is none",
        )


@dataclass(frozen=True)
class ICGOptions(GuidanceOptions):
    """Independent condition guidance (Sadat et al. 2024): a random label is the null class."""

    name: str = "icg"
    scale: float = 1.5


@dataclass(frozen=True)
class PathDropOptions(GuidanceOptions):
    """SPRINT's guidance (arXiv 2510.21986): away from a pass without the fused span's blocks."""

    name: str = "pathdrop"
    scale: float = 1.5
    null_class: bool = True


@dataclass(frozen=True)
class Rate:
    """A selection rate over the sampling steps: `0.5`, `cosine:0.6:0` or `linear:0.6:0`."""

    start: float  # rate at the first (noisiest) step
    end: float  # rate at the last step
    shape: str = "constant"  # `constant`, `linear` or `cosine` (half a cosine from start to end)

    @classmethod
    def parse(cls, text: str | float, key: str = "rate") -> Rate:
        """Read a rate."""
        if isinstance(text, Rate):
            return text
        parts = str(text).replace(" ", "").split(":")
        try:
            shape, numbers = ("constant", parts) if len(parts) == 1 else (parts[0], parts[1:])
            start, end = float(numbers[0]), float(numbers[-1])
            if shape not in ("constant", "linear", "cosine") or len(parts) not in (1, 3):
                raise ValueError
        except ValueError:
            raise DiffusionError(
                f"{key}={text}: a rate is a number such as 0.5, or a schedule from the first to "
                "the last step such as cosine:0.6:0 or linear:0.6:0"
            ) from None
        require(
            0 <= start < 1 and 0 <= end < 1,
            f"{key}={text}: a rate is the fraction of tokens that skip, 0 <= rate < 1; 0 is dense",
        )
        return cls(start, end, shape)

    def at(self, progress: float) -> float:
        """Return the rate at `progress`, 0 at the first step and 1 at the last."""
        if self.shape == "constant":
            return self.start
        ramp = progress if self.shape == "linear" else (1 - math.cos(math.pi * progress)) / 2
        return self.start + (self.end - self.start) * ramp


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
