"""The options of objectives, samplers and guidance, as frozen dataclasses (no torch here).

Each YAML file below `experiments/conf/{objective,sampler,guidance}` holds one of these. A wrong
value raises `DiffusionError`: one sentence with what is wrong and what to type instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from experiments.options.fields import Key, build, check_ranges, keys_of
from routing.errors import UserError, suggest
from routing.schedule import Schedule, ScheduleError


class DiffusionError(UserError):
    """A setting of an objective, a sampler or a guidance that cannot work."""


def require(ok: bool, message: str) -> None:
    """Raise `DiffusionError` with `message` unless `ok`."""
    if not ok:
        raise DiffusionError(message)


class DiffusionOptions:
    """Options whose ranges are declared beside their types."""

    GROUP: ClassVar[str]
    #: An option, how it compares with another one (null is beyond all), and that one.
    ORDER: ClassVar[tuple[str, str, str] | None] = None

    def __post_init__(self) -> None:
        check_ranges(self, f"{self.GROUP}.", DiffusionError)
        if self.ORDER:
            low, sign, high = self.ORDER
            least, most = getattr(self, low), getattr(self, high)
            require(
                most is None or (least < most if sign == "<" else least <= most),
                f"{self.GROUP}.{low}={least}, {high}={most}: {low} {sign} {high} is needed",
            )


Positive = Annotated[float, Key(above=0)]
NotNegative = Annotated[float, Key(least=0)]
Inside = Annotated[float, Key(above=0, below=1)]
Steps = Annotated[int, Key(least=1, most=10**5)]


# ------------------------------------------------------------------------------------- objectives


class ObjectiveOptions(DiffusionOptions):
    """What the options of all objectives have in common."""

    GROUP = "objective"
    name: str

    def check_times(self, steps: int, shift: float) -> None:
        """Refuse a sampler's number of steps, or its shift, that this objective cannot have."""
        most = getattr(self, "steps", steps)
        require(
            steps <= most,
            f"sampler.steps={steps}: objective {self.name} was trained with {most} steps; "
            f"use sampler.steps={most} or fewer",
        )
        require(
            shift == 1 or self.name == "flow",
            f"sampler.shift={shift}: objective {self.name} spaces its times by itself; use "
            "shift=1, or objective=flow",
        )


@dataclass(frozen=True)
class EDMOptions(ObjectiveOptions):
    """EDM (Karras et al. 2022, Table 1, and TREAD's settings)."""

    name: str = "edm"
    p_mean: float = -1.2
    p_std: Positive = 1.2
    sigma_data: Positive = 0.5
    sigma_min: Positive = 0.002
    sigma_max: Positive = 80.0
    rho: Positive = 7.0

    ORDER = ("sigma_min", "<", "sigma_max")


@dataclass(frozen=True)
class FlowOptions(ObjectiveOptions):
    """Flow matching as in SiT (Ma et al. 2024), with LightningDiT's extras."""

    name: str = "flow"
    times: Annotated[str, Key(among=("lognormal", "uniform"))] = "lognormal"
    mean: float = 0.0
    std: Positive = 1.0
    shift: Positive = 1.0
    cosine: NotNegative = 0.0
    time_scale: Positive = 1000.0
    reverse: bool = False
    sigma_data: Positive = 1.0


@dataclass(frozen=True)
class DDPMOptions(ObjectiveOptions):
    """DDPM as in DiT (Peebles & Xie 2023): linear betas, epsilon, optional learned variance."""

    name: str = "ddpm"
    steps: Annotated[int, Key(least=2, most=10**6)] = 1000
    beta_start: Inside = 1e-4
    beta_end: Inside = 0.02
    learn_sigma: bool = False
    vlb: NotNegative = 1.0
    sigma_data: Positive = 1.0

    ORDER = ("beta_start", "<=", "beta_end")


# --------------------------------------------------------------------------------------- samplers


@dataclass(frozen=True)
class SamplerOptions(DiffusionOptions):
    """What every sampler has; `steps` intervals from noise to data.

    Heun (order 2) has no more; its last step is Euler's, so `2 * steps - 1` evaluations: 79 for 40.
    """

    GROUP = "sampler"

    name: str = "heun"
    steps: Steps = 40
    shift: Positive = 1.0

    def check_objective(self, objective: str) -> None:
        """Refuse options that have no meaning for the objective of this name."""


@dataclass(frozen=True)
class EulerOptions(SamplerOptions):
    """Euler steps of the probability-flow ODE (order 1, one evaluation a step)."""

    name: str = "euler"
    steps: Steps = 50


@dataclass(frozen=True)
class ChurnOptions(SamplerOptions):
    """EDM's stochastic sampler (Algorithm 2): renoise a little, then a Heun step."""

    name: str = "churn"
    steps: Steps = 256
    churn: NotNegative = 40.0
    churn_min: NotNegative = 0.05
    churn_max: float = 50.0
    churn_noise: float = 1.003

    ORDER = ("churn_min", "<=", "churn_max")


#: Diffusion coefficients w(t) of SiT's code (`path.compute_diffusion`).
DIFFUSION_FORMS = ("sigma", "constant", "SBDM", "linear", "decreasing", "increasing-decreasing")


@dataclass(frozen=True)
class SDEOptions(SamplerOptions):
    """Euler-Maruyama on the reverse SDE (SiT section 3.3), the last step without noise."""

    name: str = "sde"
    steps: Steps = 250
    diffusion: Annotated[str, Key(among=DIFFUSION_FORMS)] = "sigma"
    strength: NotNegative = 1.0  # 0: the ODE
    last_step: Annotated[float, Key(least=0, below=1)] = 0.04
    last: Annotated[str, Key(among=("euler", "mean", "tweedie"))] = "euler"

    def check_objective(self, objective: str) -> None:
        """Refuse SiT's forms for other paths than SiT's."""
        for key, value, default in (
            ("diffusion", self.diffusion, "sigma"),
            ("last", self.last, "euler"),
        ):
            require(
                objective == "flow" or value == default,
                f"sampler.{key}={value} is defined for objective=flow alone; use {key}={default} "
                f"with objective {objective}",
            )


@dataclass(frozen=True)
class DDPMSamplerOptions(SamplerOptions):
    """Ancestral sampling (Ho et al. 2020) on evenly spaced times."""

    name: str = "ddpm"
    steps: Steps = 250
    variance: Annotated[str, Key(among=("learned", "small", "large"))] = "learned"


@dataclass(frozen=True)
class DDIMOptions(SamplerOptions):
    """DDIM (Song et al. 2021): `eta` 0 is deterministic, 1 is ancestral sampling."""

    name: str = "ddim"
    steps: Steps = 50
    eta: Annotated[float, Key(least=0, most=1)] = 0.0


# ---------------------------------------------------------------------------------------- guidance


@dataclass(frozen=True)
class GuidanceOptions(DiffusionOptions):
    """What every guidance has: its scale, and the noise levels (sigma / alpha) where it acts."""

    GROUP = "guidance"

    name: str = "none"
    scale: float = 1.0
    low: NotNegative = 0.0
    high: float | None = None

    ORDER = ("low", "<", "high")
    #: What the weak pass is given in place of the condition.
    WEAK: ClassVar[str] = "given"

    @property
    def weak_label(self) -> str:
        """Label of the weak pass: `given`, `null` (the null class or text) or `random`."""
        return "null" if getattr(self, "null_class", False) else self.WEAK

    @property
    def sparse(self) -> bool:
        """Whether some pass drops tokens or blocks."""
        return isinstance(self, RoutedOptions | PathDropOptions)

    @property
    def needs_weak(self) -> bool:
        """Whether a second, weaker model is part of it."""
        return isinstance(self, AutoOptions) or getattr(self, "checkpoint", None) is not None

    def check(self, *, channels: float = math.inf, **has: bool) -> None:
        """Refuse a model that lacks what this guidance works with.

        Args:
            channels: So many it has.
            **has: Whether it has the keys of `NEEDS`; what is left out is there.

        Raises:
            DiffusionError: One sentence with the way out.
        """
        needs = {
            "routed": isinstance(self, RoutedOptions),
            "conditional": self.weak_label != "given",
            "weak": self.needs_weak,
            "null_seen": self.weak_label == "null",
            "fused": isinstance(self, PathDropOptions),
        }
        for key, lacking in NEEDS.items():
            require(has.get(key, True) or not needs[key], f"guidance={self.name} needs {lacking}")
        guided = getattr(self, "channels", None) or 0
        require(
            guided <= channels,
            f"guidance.channels={guided}: the model has {channels}; type null to guide all of them",
        )


#: What a guidance may need of a model, and what to do where it is not there.
NEEDS = {
    "routed": "a route, and this model was trained without one; name one to try it "
    "(guidance.route=auto), or use guidance=cfg",
    "conditional": "a model with classes or text, and this one has neither; use guidance=none, "
    "routed or autoguidance",
    "weak": "a second, weaker model; give guidance.checkpoint=RUN@STEP, e.g. an early step of the "
    "same run",
    "null_seen": "the null class, which this run never saw (train.label_drop=0); use guidance=icg, "
    "routed or none",
    "fused": "a model with SPRINT's fusion, and this one has none; use guidance=routed or cfg",
}


@dataclass(frozen=True)
class CFGOptions(GuidanceOptions):
    """Classifier-free guidance (Ho & Salimans 2022): `D = null + scale * (cond - null)`.

    `channels` guides the first so many alone and leaves the others conditional: 3 in the published
    sampling of DiT, SiT and LightningDiT, whatever their latents have.
    """

    name: str = "cfg"
    scale: float = 1.5
    channels: Annotated[int | None, Key(least=1, tip=3)] = None

    WEAK = "null"


@dataclass(frozen=True)
class IntervalOptions(CFGOptions):
    """CFG at a limited interval of noise levels only (Kynkaanniemi et al. 2024)."""

    name: str = "interval"
    scale: float = 2.1
    low: NotNegative = 0.28
    high: float | None = 2.9


@dataclass(frozen=True)
class RoutedOptions(GuidanceOptions):
    """Routed guidance (Sparse Guidance, arXiv 2601.01608): two conditional passes, two rates."""

    name: str = "routed"
    scale: float = 1.5
    strong: str = "0.5"
    weak: str = "0.9"
    null_class: bool = False
    subsets: Annotated[str, Key(among=("independent", "nested"))] = "independent"
    route: str | None = None
    checkpoint: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        rate_over_steps(self.strong, "guidance.strong")
        rate_over_steps(self.weak, "guidance.weak")


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
    threshold: NotNegative = 2.5  # 0: no limit
    momentum: Annotated[float, Key(above=-1, below=1)] = -0.75  # 0: none

    WEAK = "null"


@dataclass(frozen=True)
class ICGOptions(GuidanceOptions):
    """Independent condition guidance (Sadat et al. 2024): a random label is the null class."""

    name: str = "icg"
    scale: float = 1.5

    WEAK = "random"


@dataclass(frozen=True)
class PathDropOptions(GuidanceOptions):
    """SPRINT's guidance (arXiv 2510.21986): away from a pass without the fused span's blocks."""

    name: str = "pathdrop"
    scale: float = 1.5
    null_class: bool = True


def rate_over_steps(text: str, key: str) -> Schedule:
    """Read the selection rate of the option `key` over the sampling steps, 0 to 1 of the way."""
    words = str(text).replace(" ", "")
    try:
        rate = Schedule.parse(words if ":" in words else f"constant:{words}")
        if rate.largest < 1:
            return rate
    except ScheduleError:
        pass
    raise DiffusionError(
        f"{key}={text}: a rate is the fraction of tokens that skip, 0 <= rate < 1, such as 0.5, or "
        "a schedule from the first to the last step such as cosine:0.6:0 or linear:0.6:0"
    )


_KINDS: tuple[Any, ...] = (
    EDMOptions, FlowOptions, DDPMOptions,
    EulerOptions, SamplerOptions, ChurnOptions, SDEOptions, DDPMSamplerOptions, DDIMOptions,
    GuidanceOptions, CFGOptions, IntervalOptions, RoutedOptions, AutoOptions, APGOptions,
    ICGOptions, PathDropOptions,
)  # fmt: skip
OPTIONS: dict[str, dict[str, type]] = {
    group: {kind.name: kind for kind in _KINDS if group == kind.GROUP}
    for group in ("objective", "sampler", "guidance")
}


def options_of(kind: str, value: Any) -> Any:
    """Return the options dataclass for `value`.

    Args:
        kind: `objective`, `sampler` or `guidance`.
        value: A name, a mapping or dataclass with a `name` (keys left out keep their defaults), or
            `None` for the group's first entry.

    Raises:
        UserError: For an unknown name or key, or a wrong value.
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
    require(name in known, f"{kind}={name}: choose one of {', '.join(known)}{suggest(name, known)}")
    types = {key: hint for key, (hint, _) in keys_of(known[name]).items()}
    return build(known[name], {k: _read(types.get(k), v) for k, v in value.items()}, f"{kind}.")


def _read(hint: Any, value: Any) -> Any:
    """Return a number that YAML or a command line gave as text, or text that looks like one."""
    target = (typing.get_args(hint) or (hint,))[0]
    if target in (int, float, str) and type(value) in (int, float, str):
        with contextlib.suppress(ValueError, OverflowError):
            found = target(value)
            if target is not int or float(value) == found:
                return found
    return value


def check_weights(source: str, theirs: Any, ours: Any) -> None:
    """Refuse weights, typed as `source`, whose objective has another input or output than ours."""
    found, wanted = (_network(options_of("objective", each)) for each in (theirs, ours))
    require(
        found == wanted,
        f"{source}: trained with {found}, whose network predicts something else than {wanted} "
        f"asks for; type {found}, or take other weights",
    )


def _network(objective: Any) -> str:
    told = {k: getattr(objective, k) for k in ("time_scale", "reverse") if hasattr(objective, k)}
    return " ".join([f"objective={objective.name}", *(f"objective.{k}={told[k]}" for k in told)])
