"""Dataclasses read back from the files of a sweep, which may be damaged or come from anybody."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from backbones.parsing import is_number
from backbones.validation import validate
from routing.errors import require
from sweeps import SweepError

Record = TypeVar("Record")


def read_record(record_type: type[Record], values: Any) -> Record:
    """Build a dataclass from plain values, ignoring keys that it does not have.

    Raises:
        UserError: A value is missing or has another type.
    """
    require(
        isinstance(values, Mapping),
        f"expected a mapping with the fields of {record_type.__name__}",
        SweepError,
    )
    names = {field.name for field in dataclasses.fields(record_type)}  # type: ignore[arg-type]
    return validate(record_type, {key: values[key] for key in values if key in names})


def is_timestamp(value: object) -> bool:
    """Return whether a value is a time in seconds that the calendar of C can show."""
    return is_number(value) and abs(value) < 1e11


def is_file_name(name: str) -> bool:
    """Return whether a name is that of a file in a folder: no path, and not hidden."""
    return bool(name) and Path(name).name == name and not name.startswith(".")
