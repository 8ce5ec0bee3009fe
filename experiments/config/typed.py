"""Make dataclasses from plain values, with every mistake named by its key (no torch here)."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from routing.errors import UserError, suggest


class ConfigError(UserError):
    """A key, a value or a combination that cannot be run."""


def build(cls: type, values: Any, where: str = "") -> Any:
    """Make a dataclass from a mapping; refuse unknown keys and wrong types by name.

    Args:
        cls: A dataclass whose annotations are plain types, unions, tuples or dataclasses.
        values: The mapping; missing keys take the class's defaults.
        where: Dotted prefix for messages, such as `train.`.

    Raises:
        ConfigError: A key is unknown or a value has the wrong type.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{where.rstrip('.') or 'the config'} must be a mapping of keys, got {values!r}"
        )
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    for key in values:
        if key not in names:
            raise ConfigError(f"unknown key {where}{key}{suggest(str(key), names)}")
    for f in dataclasses.fields(cls):
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and f.name not in values:
            raise ConfigError(f"missing key {where}{f.name}")
    return cls(
        **{key: _convert(hints[key], value, where + str(key)) for key, value in values.items()}
    )


def _convert(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, where + ".")
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        for option in typing.get_args(hint):
            try:
                return _convert(option, value, where)
            except ConfigError:
                continue
    elif hint is type(None):
        if value is None:
            return None
    elif origin is tuple:
        if isinstance(value, (list, tuple)):
            return tuple(_convert(typing.get_args(hint)[0], item, where) for item in value)
    elif origin is dict or hint is dict:
        if isinstance(value, Mapping):
            return dict(value)
    elif hint is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    elif hint is str:
        if isinstance(value, str) or (where == "route" and isinstance(value, list)):
            return value if isinstance(value, str) else "+".join(map(str, value))
        if where == "route" and value is None:
            return "none"
        if where == "size" and isinstance(value, (int, float)):
            return str(value)
    elif hint is Any or (type(value) is hint):
        return value
    if hint is int and isinstance(value, float) and value.is_integer():
        raise ConfigError(f"{where}={value!r}: expected a whole number; type {where}={int(value)}")
    raise ConfigError(f"{where}={value!r}: expected {_type_name(hint)}, got {type(value).__name__}")


def _type_name(hint: Any) -> str:
    names = {
        int: "a whole number",
        float: "a number",
        str: "a word",
        bool: "true or false",
        type(None): "null",
    }
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_type_name(option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return "a list such as [0.9,0.999]"
    return names.get(hint, str(hint))
