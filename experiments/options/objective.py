"""Options of the training objectives (no torch here)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from experiments.options.roles import ConfigError, Default
from routing.errors import require
from routing.options import OMITTED_AT_DEFAULT

SIGMA_DATA = "Standard deviation to which the data are scaled."


@dataclass(frozen=True)
class ObjectiveOptions:
    """Options shared by all objectives."""

    name: str
    sigma_data: Annotated[float, Gt(0), SIGMA_DATA] = 1.0

    @property
    def network(self) -> dict[str, object]:
        """What fixes the meaning of the network's input and output."""
        return {"name": self.name}

    @property
    def learns_variance(self) -> bool:
        """Whether the network predicts a variance too, in as many output channels again."""
        return False

    def check_times(self, steps: int, shift: float) -> None:
        """Refuse a sampler's number of steps, or its shift, that this objective cannot have."""
        require(
            shift == 1,
            f"sampler.shift={shift}: expected 1 for objective={self.name}, which spaces its own "
            "times; only objective=flow can shift them",
            ConfigError,
        )


@dataclass(frozen=True)
class EDMOptions(ObjectiveOptions):
    """EDM (Karras et al. 2022, Table 1): the objective of TREAD's DiT, Mamba and RWKV rows."""

    name: str = "edm"
    p_mean: Annotated[
        float,
        Default("${data_default:${data.name},p_mean}"),
        "Mean of ln(sigma) in training; follows the data set (-1.2 for latents, 0 for mnist and "
        "fashion).",
    ] = -1.2
    p_std: Annotated[float, Gt(0), "Standard deviation of ln(sigma) in training."] = 1.2
    sigma_data: Annotated[float, Gt(0), SIGMA_DATA] = 0.5
    sigma_min: Annotated[float, Gt(0), "Last noise level of the sampler before 0."] = 0.002
    sigma_max: Annotated[float, Gt(0), "First noise level of the sampler."] = 80.0
    rho: Annotated[
        float, Gt(0), "Spacing of the sampler's levels; larger puts more of them at low noise."
    ] = 7.0

    def check_consistency(self) -> None:
        """Refuse an empty range of noise levels."""
        require(
            self.sigma_min < self.sigma_max,
            f"objective.sigma_min={self.sigma_min}: expected a value below "
            f"objective.sigma_max={self.sigma_max}",
            ConfigError,
        )


@dataclass(frozen=True)
class FlowOptions(ObjectiveOptions):
    """Flow matching on the linear path as in SiT (Ma et al. 2024), with LightningDiT's extras."""

    name: str = "flow"
    times: Annotated[
        Literal["lognormal", "uniform"],
        "Training times: lognormal is sigmoid(N(mean, std^2)); uniform is SiT's.",
    ] = "lognormal"
    mean: Annotated[float, "Mean of the normal in lognormal."] = 0.0
    std: Annotated[float, Gt(0), "Standard deviation of the normal in lognormal."] = 1.0
    shift: Annotated[
        float, Gt(0), "Time shift; above 1 trains more on high noise (see also sampler.shift)."
    ] = 1.0
    cosine: Annotated[
        float, Ge(0), "Weight of LightningDiT's 1 - cos(velocity, target); LightningDiT uses 1."
    ] = 0.0
    time_scale: Annotated[
        float, Gt(0), "The network receives time_scale * t; SiT, LightningDiT and TREAD use 1."
    ] = 1000.0
    reverse: Annotated[
        bool, "Time runs from noise to data (t = 1 is data), as in SiT's released weights."
    ] = False
    prediction: Annotated[
        Literal["v", "x", "eps"],
        OMITTED_AT_DEFAULT,
        "What the network predicts: the velocity, the clean image (JiT) or the noise; the loss is "
        "on the velocity for all three.",
    ] = "v"
    noise_scale: Annotated[
        float,
        Gt(0),
        OMITTED_AT_DEFAULT,
        "Standard deviation of the noise (JiT: 1 at 256 pixels, 2 at 512).",
    ] = 1.0
    clamp: Annotated[
        float,
        Gt(0),
        Lt(1),
        OMITTED_AT_DEFAULT,
        "Smallest divisor where a predicted image or noise becomes a velocity (JiT's t_eps).",
    ] = 0.05

    @property
    def network(self) -> dict[str, object]:
        """What fixes the meaning of the network's input and output."""
        meaning: dict[str, object] = {
            "name": self.name,
            "time_scale": self.time_scale,
            "reverse": self.reverse,
        }
        if self.prediction != "v":
            meaning["prediction"] = self.prediction
        if self.noise_scale != 1:
            meaning["noise_scale"] = self.noise_scale
        return meaning

    def check_times(self, steps: int, shift: float) -> None:
        """Accept any number of steps and any shift."""


@dataclass(frozen=True)
class DDPMOptions(ObjectiveOptions):
    """DDPM as in DiT (Peebles & Xie 2023): linear betas, epsilon, optional learned variance."""

    name: str = "ddpm"
    steps: Annotated[int, Ge(2), Le(10**6), "Training steps of the chain."] = 1000
    beta_start: Annotated[float, Gt(0), Lt(1), "First of the linear betas (Ho et al. 2020)."] = 1e-4
    beta_end: Annotated[float, Gt(0), Lt(1), "Last of the linear betas."] = 0.02
    learn_sigma: Annotated[
        bool, "Also predict the variance, in twice the output channels (improved DDPM, DiT)."
    ] = False
    vlb: Annotated[
        float, Ge(0), "Weight of the variational bound that trains the learned variance."
    ] = 1.0

    @property
    def learns_variance(self) -> bool:
        """Whether the network predicts a variance too: `learn_sigma`."""
        return self.learn_sigma

    def check_consistency(self) -> None:
        """Refuse decreasing betas."""
        require(
            self.beta_start <= self.beta_end,
            f"objective.beta_start={self.beta_start}: expected at most "
            f"objective.beta_end={self.beta_end}",
            ConfigError,
        )

    def check_times(self, steps: int, shift: float) -> None:
        """Refuse more sampling steps than the chain has, and a time shift."""
        super().check_times(steps, shift)
        require(
            steps <= self.steps,
            f"sampler.steps={steps}: expected at most objective.steps={self.steps}",
            ConfigError,
        )


OBJECTIVES: dict[str, type[ObjectiveOptions]] = {
    "edm": EDMOptions,
    "flow": FlowOptions,
    "ddpm": DDPMOptions,
}


def check_same_network(source: str, theirs: ObjectiveOptions, ours: ObjectiveOptions) -> None:
    """Refuse weights whose objective gives the network's input or output another meaning.

    Args:
        source: The weights as typed, for the error.
        theirs: Options of the objective that they were trained with.
        ours: Options of the objective that they would be used with.

    Raises:
        ConfigError: The two differ.
    """
    trained, expected = theirs.network, ours.network
    require(
        trained == expected,
        f"{source}: trained with objective {_words(trained)}, expected {_words(expected)}",
        ConfigError,
    )


def _words(network: dict[str, object]) -> str:
    return " ".join(f"{key}={value}" for key, value in network.items())
