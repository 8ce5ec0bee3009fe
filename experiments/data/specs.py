"""All data sets by name: conf/data/NAME.yaml, and options in NAME.py or NAME_spec.py (no torch)."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, cast

from experiments.data.data_options import DataError, DataOptions, require
from experiments.runtime.keys import keys_of
from routing.errors import suggest

_HERE = Path(__file__).parent


def names() -> tuple[str, ...]:
    """Return the names that `data=` takes."""
    return tuple(sorted(path.stem for path in (_HERE.parent / "conf" / "data").glob("*.yaml")))


def options_class(name: str) -> type[DataOptions]:
    """Return the class of a data set's options."""
    known = names()
    require(
        name in known,
        f"unknown data set {name!r}: expected one of {', '.join(known)}{suggest(name, known)}",
    )
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


def suited(name: str, key: str) -> Any:
    """Return a value of a run's configuration that a data set wants: its `patch` or `p_mean`."""
    return getattr(options_class(name), key)


def evaluation(name: str) -> str:
    """Return the file of experiments/conf/eval that scores a data set where none is chosen."""
    return options_class(name).evaluation if name in names() else "none"


def places(name: str) -> tuple[str, ...]:
    """Return the options that say where a data set's files are, and nothing of what they hold."""
    return options_class(name).places if name in names() else ()
