"""Data sets by name: their options, and their description before any file is read (no torch).

A data set NAME is a class `NameOptions`: those of the suite are in `image_options.py` and
`latent_options.py`, any other one in a file `experiments/data/NAME.py`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated, Any, ClassVar, cast

from annotated_types import Gt

import experiments.data
from backbones.validation import validate
from experiments.options.roles import Default
from routing import errors
from routing.errors import UserError, one_of

TASKS = ("class", "text", "none")
#: Suffixes of the images that `experiments/prepare.py` reads.
PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")


class DataError(UserError):
    """Data that are missing, damaged, or in an unexpected layout."""


class ShapeError(DataError):
    """Latents whose shape differs from `data.shape`."""


#: Refuse data unless a condition holds: `require(condition, message)`.
require = functools.partial(errors.require, error=DataError)


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@dataclass(frozen=True)
class DataOptions:
    """Base class of the options of a data set.

    The class attributes describe the data set without reading it. They are enough to name a run,
    count its parameters and FLOPs and check it before submission, also on a machine that does not
    hold the data.
    """

    name: str
    sigma_data: Annotated[
        float,
        Gt(0),
        Default("${objective.sigma_data}"),
        "Standard deviation to which the data are scaled; follows the objective (EDM, Table 1: "
        "0.5).",
    ] = 0.5

    sample_shape: ClassVar[tuple[int, int, int]] = (0, 0, 0)  # (C, H, W)
    class_count: ClassVar[int] = 0  # 0 without labels
    caption_shape: ClassVar[tuple[int, int] | None] = None  # (L, E), or None without captions
    dataset: ClassVar[str]  # module and name of the `Dataset`
    patch: ClassVar[int] = 2  # patch size at scale `tiny`
    # Mean of ln(sigma) in EDM's training. Images with redundant pixels need more noise before their
    # content is hidden. The default is the paper's for latents.
    p_mean: ClassVar[float] = -1.2
    cfg_scale: ClassVar[float] = 1.5  # scale of classifier-free guidance
    # Options that only locate files whose contents are fixed by published checksums. They are not
    # part of a run's identity.
    location_keys: ClassVar[tuple[str, ...]] = ()
    source: ClassVar[str] = ""  # origin and licence; exported with the weights

    def describe(self) -> dict[str, Any]:
        """Return name, shape, number of classes and caption shape of the data.

        Raises:
            DataError: The files exist and contradict the options.
        """
        return {
            "name": self.name,
            "shape": list(self.sample_shape),
            "num_classes": self.class_count,
            "text": list(self.caption_shape) if self.caption_shape else None,
        }

    def check_files(self) -> None:
        """Raise `DataError` for missing files, without reading any."""

    def check_contents(self, task: str) -> None:
        """Raise `DataError` for contents that cannot train this `task`; used by a dry run."""

    def fingerprint(self) -> str:
        """Return the part of a run's hash that follows the data's contents.

        It is `embedded` for data that are a function of the options, and `absent` for missing data.
        """
        return "embedded"


# --- data sets by name ----------------------------------------------------------------------------


#: Modules of this package that hold the options of the suite's own data sets.
_MODULES = {
    "digits": "image_options",
    "fashion": "image_options",
    "icons": "image_options",
    "latents": "latent_options",
    "mnist": "image_options",
    "scenes": "image_options",
    "torchvision": "image_options",
}
_CONF = Path(__file__).parents[1] / "conf"


def _class_name(name: str) -> str:
    return f"{name.capitalize()}Options"


def names() -> tuple[str, ...]:
    """Return the names that `data=` takes: those of the suite, and files NAME.py in this folder."""
    data_sets = set(_MODULES)
    for folder in experiments.data.__path__:
        for path in Path(folder).glob("*.py"):
            if f"\nclass {_class_name(path.stem)}(" in path.read_text(encoding="utf-8"):
                data_sets.add(path.stem)
    return tuple(sorted(data_sets))


def options_class(name: str) -> type[DataOptions]:
    """Return the class of a data set's options."""
    if name not in _MODULES:
        one_of("unknown data set", name, names(), DataError)
    module = importlib.import_module(f"experiments.data.{_MODULES.get(name, name)}")
    return cast(type[DataOptions], getattr(module, _class_name(name)))


def parse(options: DataOptions | Mapping[str, Any]) -> DataOptions:
    """Return validated options.

    Args:
        options: A mapping (dict, DictConfig) with a `name`, or options, which are returned as is.

    Raises:
        DataError: An unknown data set.
        OptionError: An unknown key, or a value of another type or range.
    """
    if isinstance(options, DataOptions):
        return options
    values = {}
    for key, value in options.items():
        if isinstance(value, PurePath):
            value = str(value)
        elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
            value = list(value)  # also OmegaConf's lists
        values[key] = value
    return cast(DataOptions, validate(options_class(str(values.get("name", ""))), values, "data."))


def describe(options: DataOptions | Mapping[str, Any]) -> dict[str, Any]:
    """Return a data set's name, shape, number of classes and caption shape without reading it."""
    return parse(options).describe()


def fingerprint(options: DataOptions | Mapping[str, Any]) -> str:
    """Return the part of a run's hash that follows the data's contents."""
    return parse(options).fingerprint()


def evaluation_preset(name: str) -> str:
    """Return the preset in conf/eval that scores a data set by default; `none` if it has none."""
    return name if (_CONF / "eval" / f"{name}.yaml").is_file() else "none"


def location_keys(name: str) -> tuple[str, ...]:
    """Return the options that only locate a data set's files; () for an unknown data set."""
    return options_class(name).location_keys if name in names() else ()
