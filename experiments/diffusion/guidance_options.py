"""The options of every guidance, as frozen dataclasses (no torch here)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from experiments.diffusion.option_checks import DiffusionError, one_of, require


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
    """A selection rate over the sampling steps: `0.5`, `cosine:0.6:0` or `linear:0.6:0`.

    Attributes:
        start: Rate at the first (noisiest) step.
        end: Rate at the last step.
        shape: `constant`, `linear` or `cosine` (half a cosine from start to end).
    """

    start: float
    end: float
    shape: str = "constant"

    @classmethod
    def parse(cls, text: str | float, key: str = "rate") -> Rate:
        """Read a rate.

        Raises:
            DiffusionError: If the text is no rate or a rate lies outside 0 <= rate < 1.
        """
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
