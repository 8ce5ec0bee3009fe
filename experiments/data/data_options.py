"""What the options of all data sets share, and the errors of data (no torch here)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from experiments.runtime.keys import Key, check_ranges
from routing.errors import UserError

TASKS = ("class", "text", "none")


class DataError(UserError):
    """Data that are missing, damaged, or laid out otherwise than they should be."""


class ShapeError(DataError):
    """Latents of another shape than `data.shape`."""


def require(ok: bool, message: str) -> None:
    """Raise `DataError` with `message` unless `ok`."""
    if not ok:
        raise DataError(message)


def first_line(error: Exception) -> str:
    """Return the first line of what an exception says, or its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@dataclass(frozen=True)
class DataOptions:
    """What every data set has: its options, and what is known of it without reading it.

    The class attributes are enough to name a run, to count its parameters and FLOPs and to check
    it before it is submitted, also on a machine that does not hold the data.
    """

    name: str
    # Standard deviation of the data as the model sees them (EDM, table 1: 0.5)
    sigma_data: Annotated[float, Key(above=0)] = 0.5

    sample_shape: ClassVar[tuple[int, int, int]] = (0, 0, 0)  # (C, H, W)
    class_count: ClassVar[int] = 0  # 0: none
    caption_shape: ClassVar[tuple[int, int] | None] = None  # (L, E), or None without captions
    dataset: ClassVar[str]  # module and name of the class that makes the batches
    evaluation: ClassVar[str] = "none"  # what scores it: a file of experiments/conf/eval
    patch: ClassVar[int] = 2  # side of a patch at scale `tiny`
    # Mean of ln(sigma) in EDM's training; the more pixels say the same, the more noise it takes to
    # hide what a picture shows. The paper's for latents.
    p_mean: ClassVar[float] = -1.2
    cfg_scale: ClassVar[float] = 1.5  # scale of classifier-free guidance
    # Options that say where the files are, of a set whose files are checked against the published
    # checksums: no part of what a run is.
    places: ClassVar[tuple[str, ...]] = ()
    source: ClassVar[str] = ""  # where the data come from, as it travels with the weights

    def __post_init__(self) -> None:
        check_ranges(self, "data.", DataError)

    def describe(self) -> dict[str, Any]:
        """Return name, shape, number of classes and caption shape, as `build.describe_data` does.

        Raises:
            DataError: Files that are there and contradict the options.
        """
        return {
            "name": self.name,
            "shape": list(self.sample_shape),
            "num_classes": self.class_count,
            "text": list(self.caption_shape) if self.caption_shape else None,
        }

    def check(self) -> None:
        """Refuse files that are not there, as far as that needs no reading of them.

        Raises:
            DataError: Says what to type.
        """

    def fingerprint(self) -> str:
        """Return what changes when the data change while the options stay: part of a run's name.

        A data set that is a function of its options is `embedded`; one that is not there `absent`.
        """
        return "embedded"
