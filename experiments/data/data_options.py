"""All data sets by name, what their options share, and the errors of data (no torch here).

A data set is conf/data/NAME.yaml, and options in NAME.py, or in NAME_spec.py where NAME.py needs
torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated, Any, ClassVar, cast

from experiments.runtime.option_types import Key, check_ranges, keys_of
from routing.errors import UserError, one_of, suggest

TASKS = ("class", "text", "none")
#: Suffixes of the pictures that `experiments/prepare.py` reads.
PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")


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
        """Refuse files that are not there, unread: the `DataError` says what to type."""

    def fingerprint(self) -> str:
        """Return what changes when the data change while the options stay: part of a run's name.

        A data set that is a function of its options is `embedded`; one that is not there `absent`.
        """
        return "embedded"


# --- all data sets by name ------------------------------------------------------------------------


_HERE = Path(__file__).parent


def names() -> tuple[str, ...]:
    """Return the names that `data=` takes."""
    return tuple(sorted(path.stem for path in (_HERE.parent / "conf" / "data").glob("*.yaml")))


def options_class(name: str) -> type[DataOptions]:
    """Return the class of a data set's options."""
    one_of("unknown data set", name, names(), DataError)
    # Where the data set itself imports torch, its options have a file of their own.
    file = f"{name}_spec" if (_HERE / f"{name}_spec.py").is_file() else name
    module = importlib.import_module(f"experiments.data.{file}")
    return next(v for v in vars(module).values() if getattr(v, "name", None) == name)


def parse(options: DataOptions | Mapping[str, Any]) -> DataOptions:
    """Return checked options from a mapping (dict, DictConfig) with a `name`, or the options.

    Raises:
        DataError: An unknown data set or key, or a value out of its range.
    """
    if isinstance(options, DataOptions):
        return options
    values = dict(options)
    name = str(values.get("name", ""))
    made = options_class(name)
    known = keys_of(cast(Any, made))
    for key, value in values.items():
        require(key in known, f"unknown key data.{key} of data={name}{suggest(key, known)}")
        text = known[key][0] not in (str, str | None) or isinstance(value, str | PurePath | None)
        require(text, f"data.{key}={value!r}: expected text")
    try:
        return made(**values)
    except (TypeError, OverflowError, AttributeError) as error:
        raise DataError(f"data={name}: a value of the wrong type ({error})") from None


def describe(options: DataOptions | Mapping[str, Any]) -> dict[str, Any]:
    """Return a data set's name, shape, number of classes and caption shape without reading it."""
    return parse(options).describe()


def fingerprint(options: DataOptions | Mapping[str, Any]) -> str:
    """Return what changes when the data change while the options stay: part of a run's name."""
    return parse(options).fingerprint()


def evaluation(name: str) -> str:
    """Return the file of experiments/conf/eval that scores a data set where none is chosen."""
    return options_class(name).evaluation if name in names() else "none"


def places(name: str) -> tuple[str, ...]:
    """Return the options that say where a data set's files are, and nothing of what they hold."""
    return options_class(name).places if name in names() else ()
