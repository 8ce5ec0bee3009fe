"""Options of guidance (no torch here)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Lt

from experiments.options.roles import ConfigError, Default
from routing.errors import require
from routing.options import OMITTED_AT_DEFAULT
from routing.route import Route
from routing.schedule import Schedule, ScheduleError

SCALE = "Guidance scale; 1 is no guidance."
LOW = "Guidance acts where low < sigma / alpha <= high."
HIGH = "Upper end of that interval; null has no bound."
NULL_CLASS = "Give the weak pass the null class as well."


@dataclass(frozen=True)
class GuidanceOptions:
    """Options shared by all guidance: its scale and the noise levels at which it acts."""

    name: str = "none"
    scale: Annotated[float, SCALE] = 1.0
    low: Annotated[float, Ge(0), LOW] = 0.0
    high: Annotated[float | None, HIGH] = None

    #: Condition of the weak pass: `given`, `null` (the null class or text) or `random`.
    WEAK_LABEL: ClassVar[str] = "given"
    #: Whether some pass drops tokens or blocks.
    sparse: ClassVar[bool] = False

    @property
    def weak_label(self) -> str:
        """Condition of the weak pass: `given`, `null` (the null class or text) or `random`."""
        return "null" if getattr(self, "null_class", False) else self.WEAK_LABEL

    @property
    def needs_weak_model(self) -> bool:
        """Whether a second, weaker model is part of it."""
        return getattr(self, "checkpoint", None) is not None

    def route_of_passes(self, trained: Route | str | None) -> Route:
        """Return the route of sparse passes: its own, or the one the model was trained with."""
        own = getattr(self, "route", None)
        return Route.parse(trained if own is None else own)

    def check_consistency(self) -> None:
        """Refuse an empty interval of noise levels."""
        require(
            self.high is None or self.low < self.high,
            f"guidance.low={self.low}: expected a value below guidance.high={self.high}",
            ConfigError,
        )

    def check_model(
        self,
        *,
        conditional: bool = True,
        null_class_trained: bool = True,
        routed: bool = True,
        fused: bool = True,
        weak_model: bool = True,
        channels: float = math.inf,
    ) -> None:
        """Refuse a model that lacks what this guidance works with.

        Args:
            conditional: Whether the model has classes or text.
            null_class_trained: Whether training dropped labels.
            routed: Whether there is a route.
            fused: Whether the model has SPRINT's fusion.
            weak_model: Whether a second, weaker model is given.
            channels: Channels of the model's images.

        Raises:
            ConfigError: One sentence that names what is missing.
        """
        missing = ""
        if isinstance(self, RoutedOptions) and not routed:
            missing = "a route: train with one, or set guidance.route=auto"
        elif self.weak_label != "given" and not conditional:
            missing = "a model with classes or text (guidance=none or routed does not)"
        elif self.needs_weak_model and not weak_model:
            missing = "a second, weaker model: set guidance.checkpoint=RUN@STEP"
        elif self.weak_label == "null" and not null_class_trained:
            missing = (
                "the null class, never trained with train.label_drop=0 (guidance=icg does not)"
            )
        elif isinstance(self, PathDropOptions) and not fused:
            missing = "a model with SPRINT's fusion (routing.learned=fuse)"
        if missing:
            raise ConfigError(f"guidance={self.name} needs {missing}")
        guided = getattr(self, "channels", None) or 0
        if guided > channels:
            raise ConfigError(f"guidance.channels={guided}: expected at most {channels} or null")


@dataclass(frozen=True)
class CFGOptions(GuidanceOptions):
    """Classifier-free guidance (Ho & Salimans 2022): `D = null + scale * (conditional - null)`."""

    name: str = "cfg"
    scale: Annotated[
        float, Default("${data_default:${data.name},cfg_scale}"), f"{SCALE} Follows the data set."
    ] = 1.5
    channels: Annotated[
        int | None,
        Ge(1),
        OMITTED_AT_DEFAULT,
        "Guide only the first channels: 3 in the published sampling of DiT, SiT and LightningDiT; "
        "null guides all.",
    ] = None

    WEAK_LABEL = "null"


@dataclass(frozen=True)
class IntervalOptions(CFGOptions):
    """CFG in a limited interval of noise levels (Kynkaanniemi et al. 2024; EDM2's values)."""

    name: str = "interval"
    scale: Annotated[float, SCALE] = 2.1
    low: Annotated[float, Ge(0), LOW] = 0.28
    high: Annotated[float | None, HIGH] = 2.9


@dataclass(frozen=True)
class RoutedOptions(GuidanceOptions):
    """Routed guidance (Sparse Guidance, arXiv 2601.01608): two conditional passes at two rates.

    The defaults are SG_FLOPS. SG_FID is strong=cosine:0:0.6 weak=cosine:0.6:0 with an early
    checkpoint of the run as the weak model.
    """

    name: str = "routed"
    scale: Annotated[float, "Guidance scale; 1 is the strong pass alone."] = 1.5
    strong: Annotated[
        str | float,
        "Selection rate (fraction of tokens that skip) of the strong pass; 0 is dense, "
        "cosine:0.6:0 changes it over the sampling steps.",
    ] = "0.5"
    weak: Annotated[str | float, "Selection rate of the weak pass, likewise."] = "0.9"
    null_class: Annotated[bool, NULL_CLASS] = False
    subsets: Annotated[
        Literal["independent", "nested"],
        "Tokens of the two passes: drawn independently (SG), or the weak pass keeps a subset of "
        "the strong one's.",
    ] = "independent"
    route: Annotated[str | None, "Route of both passes; null is the route of training."] = None
    checkpoint: Annotated[
        str | None, "Run or file of another model for the weak pass; null is the same model."
    ] = None

    sparse = True

    def check_consistency(self) -> None:
        """Refuse rates that are none."""
        super().check_consistency()
        rate_over_steps(self.strong, "guidance.strong")
        rate_over_steps(self.weak, "guidance.weak")


@dataclass(frozen=True)
class AutoOptions(GuidanceOptions):
    """Autoguidance (Karras et al. 2024): away from a weaker checkpoint, both conditional."""

    name: str = "autoguidance"
    scale: Annotated[float, SCALE] = 1.5
    checkpoint: Annotated[
        str | None, "Run or file of the weaker model, e.g. RUN@STEP of the same run; required."
    ] = None

    @property
    def needs_weak_model(self) -> bool:
        """Always."""
        return True


@dataclass(frozen=True)
class APGOptions(GuidanceOptions):
    """Adaptive projected guidance (Sadat et al. 2024): CFG without its saturation."""

    name: str = "apg"
    scale: Annotated[float, SCALE] = 4.0
    eta: Annotated[
        float, "Factor of the difference's part that is parallel to the prediction; 1 is CFG."
    ] = 0.0
    threshold: Annotated[
        float, Ge(0), "Largest norm of the difference (scales with the image size); 0: no limit."
    ] = 2.5
    momentum: Annotated[
        float, Gt(-1), Lt(1), "Momentum of the difference over evaluations; negative damps it."
    ] = -0.75

    WEAK_LABEL = "null"


@dataclass(frozen=True)
class ICGOptions(GuidanceOptions):
    """Independent condition guidance (Sadat et al. 2024): a random label as the null class."""

    name: str = "icg"
    scale: Annotated[float, SCALE] = 1.5

    WEAK_LABEL = "random"


@dataclass(frozen=True)
class PathDropOptions(GuidanceOptions):
    """SPRINT's guidance (arXiv 2510.21986): the weak pass skips the blocks of the fused span."""

    name: str = "pathdrop"
    scale: Annotated[float, SCALE] = 1.5
    null_class: Annotated[bool, NULL_CLASS] = True

    sparse = True


GUIDANCE: dict[str, type[GuidanceOptions]] = {
    "none": GuidanceOptions,
    "cfg": CFGOptions,
    "interval": IntervalOptions,
    "routed": RoutedOptions,
    "autoguidance": AutoOptions,
    "apg": APGOptions,
    "icg": ICGOptions,
    "pathdrop": PathDropOptions,
}


def rate_over_steps(rate: str | float, key: str) -> Schedule:
    """Parse a selection rate over the sampling steps (progress 0 to 1).

    Args:
        rate: A number, or a schedule such as `cosine:0.6:0`.
        key: The option, for an error.

    Raises:
        ConfigError: No schedule, or a rate outside [0, 1).
    """
    text = str(rate).replace(" ", "")
    try:
        schedule = Schedule.parse(text if ":" in text else f"constant:{text}")
    except ScheduleError:
        schedule = None
    if schedule is None or schedule.largest >= 1:
        raise ConfigError(
            f"{key}={rate}: expected a rate >= 0 and < 1, or a schedule such as cosine:0.6:0"
        )
    return schedule
