"""The data sets by name, and their description before any file is read (no torch here).

A data set is a dataclass of options derived from `DataOptions`, and an entry in `DATA_SETS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, cast

from backbones.validation import validate
from experiments.data.data_options import OWN_PICTURES, DataError, DataOptions
from experiments.data.image_options import (
    TORCHVISION_SETS,
    DigitsOptions,
    FashionOptions,
    MnistOptions,
    ScenesOptions,
    TorchvisionOptions,
)
from experiments.data.latent_options import LatentsOptions
from experiments.data.picture_folder import FolderOptions
from routing.errors import suggest

DATA_SETS: dict[str, type[DataOptions]] = {
    "digits": DigitsOptions,
    "fashion": FashionOptions,
    "folder": FolderOptions,
    "latents": LatentsOptions,
    "mnist": MnistOptions,
    "scenes": ScenesOptions,
    "torchvision": TorchvisionOptions,
}
_CONF = Path(__file__).parents[1] / "conf"


def options_class(name: str) -> type[DataOptions]:
    """Return the class of a data set's options.

    Raises:
        DataError: An unknown data set; the message suggests what to type instead.
    """
    if name not in DATA_SETS:
        raise DataError(f"data={name}: expected one of {', '.join(DATA_SETS)}{_suggestion(name)}")
    return DATA_SETS[name]


def _suggestion(name: str) -> str:
    """Return the closest data set, one of torchvision's, or what to do with one's own pictures."""
    for torchvision_name in TORCHVISION_SETS:
        if name.lower() == torchvision_name.lower() and name.lower() not in DATA_SETS:
            return f"; did you mean data=torchvision data.set={torchvision_name}?"
    return suggest(name, DATA_SETS) or f"; {OWN_PICTURES}"


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
    options_of_set = options_class(str(values.get("name", "")))
    return cast(DataOptions, validate(options_of_set, values, "data."))


def evaluation_preset(name: str) -> str:
    """Return the preset in conf/eval that scores a data set by default; `none` if it has none."""
    return name if (_CONF / "eval" / f"{name}.yaml").is_file() else "none"


def location_keys(name: str) -> tuple[str, ...]:
    """Return the options that only locate a data set's files; () for an unknown data set."""
    return DATA_SETS[name].location_keys if name in DATA_SETS else ()
