"""Options of the samplers, each with the class that samples (no torch here).

A sampler is a dataclass derived from `SamplerOptions`, and an entry in `SAMPLERS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt

from experiments.options.roles import ConfigError
from routing.errors import require

STEPS = "Intervals from noise to data."
Steps = Annotated[int, Ge(1), Le(10**5), STEPS]


@dataclass(frozen=True)
class SamplerOptions:
    """Options shared by all samplers."""

    #: The class that samples, `module:Class`; it is imported when a sampler is made.
    SAMPLER: ClassVar[str]

    name: str
    steps: Steps = 40
    shift: Annotated[
        float,
        Gt(0),
        "Time shift of flow matching; above 1 spends more steps on high noise (LightningDiT's 0.3 "
        "is 1/0.3 here).",
    ] = 1.0

    def __init_subclass__(cls) -> None:
        # An inherited class would sample, but by another method than the name says.
        if "SAMPLER" not in vars(cls):
            raise TypeError(f"{cls.__name__}: set SAMPLER to the class that samples, MODULE:CLASS")

    def check_objective(self, objective: str) -> None:
        """Refuse options that have no meaning for the objective of this name."""


@dataclass(frozen=True)
class HeunOptions(SamplerOptions):
    """Heun's method (order 2); its last step is Euler's, so 79 evaluations for 40 steps."""

    SAMPLER = "experiments.diffusion.samplers:Heun"

    name: str = "heun"


@dataclass(frozen=True)
class EulerOptions(SamplerOptions):
    """Euler steps of the probability-flow ODE (SG: 40 steps, TREAD: 50, LightningDiT: 250)."""

    SAMPLER = "experiments.diffusion.samplers:Euler"

    name: str = "euler"
    steps: Steps = 50


@dataclass(frozen=True)
class ChurnOptions(SamplerOptions):
    """EDM's stochastic sampler (Karras et al. 2022, Algorithm 2) with its ImageNet-64 values."""

    SAMPLER = "experiments.diffusion.samplers:Churn"

    name: str = "churn"
    steps: Steps = 256
    churn: Annotated[float, Ge(0), "S_churn: noise added over all steps; 0 is Heun."] = 40.0
    churn_min: Annotated[float, Ge(0), "S_min: noise level from which noise is added."] = 0.05
    churn_max: Annotated[float, "S_max: noise level up to which noise is added."] = 50.0
    churn_noise: Annotated[float, "S_noise: factor of the added noise."] = 1.003

    def check_consistency(self) -> None:
        """Refuse an empty range of noise levels."""
        require(
            self.churn_min <= self.churn_max,
            f"sampler.churn_min={self.churn_min}: expected at most "
            f"sampler.churn_max={self.churn_max}",
            ConfigError,
        )


@dataclass(frozen=True)
class SDEOptions(SamplerOptions):
    """Euler-Maruyama on the reverse SDE (SiT, section 3.3); the last step adds no noise."""

    SAMPLER = "experiments.diffusion.samplers:SDE"

    name: str = "sde"
    steps: Steps = 250
    diffusion: Annotated[
        Literal["sigma", "constant", "SBDM", "linear", "decreasing", "increasing-decreasing"],
        "Form of the diffusion coefficient w(t), SiT's names; all but sigma need objective=flow.",
    ] = "sigma"
    strength: Annotated[
        float, Ge(0), "Factor of w (SiT's diffusion_norm); 0 is the ODE, except for decreasing."
    ] = 1.0
    last_step: Annotated[
        float, Ge(0), Lt(1), "Length of the last step (SiT's last_step_size; flow only)."
    ] = 0.04
    last: Annotated[
        Literal["euler", "mean", "tweedie"],
        "Last step: euler (of the ODE), mean (SiT's default, flow only) or tweedie (the predicted "
        "image, flow only).",
    ] = "euler"

    def check_objective(self, objective: str) -> None:
        """Refuse SiT's forms for other paths than SiT's."""
        for key, value, default in (
            ("diffusion", self.diffusion, "sigma"),
            ("last", self.last, "euler"),
        ):
            if objective != "flow" and value != default:
                raise ConfigError(
                    f"sampler.{key}={value}: expected {default} for objective={objective}; the "
                    "others are defined for objective=flow"
                )


@dataclass(frozen=True)
class DDPMSamplerOptions(SamplerOptions):
    """Ancestral sampling (Ho et al. 2020) on evenly spaced times: DiT's sampler."""

    SAMPLER = "experiments.diffusion.samplers:Ancestral"

    name: str = "ddpm"
    steps: Steps = 250
    variance: Annotated[
        Literal["learned", "small", "large"],
        "Variance of the reverse step: learned (small where the model has none), small "
        "(posterior) or large (beta).",
    ] = "learned"


@dataclass(frozen=True)
class DDIMOptions(SamplerOptions):
    """DDIM (Song et al. 2021)."""

    SAMPLER = "experiments.diffusion.samplers:DDIM"

    name: str = "ddim"
    steps: Steps = 50
    eta: Annotated[
        float, Ge(0), Le(1), "Share of the posterior's noise: 0 deterministic, 1 ancestral."
    ] = 0.0


SAMPLERS: dict[str, type[SamplerOptions]] = {
    "heun": HeunOptions,
    "euler": EulerOptions,
    "churn": ChurnOptions,
    "sde": SDEOptions,
    "ddpm": DDPMSamplerOptions,
    "ddim": DDIMOptions,
}
