"""Options' types, ranges and words: declared in dataclasses, checked alike (no torch here)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import ge, gt, le, lt
from typing import Any

from routing.errors import UserError, suggest


class ConfigError(UserError):
    """A key, a value or a combination that cannot be run."""


@dataclass(frozen=True)
class Key:
    """What is declared of an option beside its type, as `Annotated[int, Key(...)]`.

    Its role is what the key decides; hash, grouping of runs, budgets and display names follow:

        learns   what is learnt: other values are another experiment
        routes   what is done to the tokens while training: the treatment that tables compare
        scores   how samples are made and measured
        reports  where and how a run computes and what it leaves on disk: the same run
    """

    role: str = "learns"
    least: float | None = None  # the smallest value
    above: float | None = None  # all values are larger
    most: float | None = None  # the largest value
    below: float | None = None  # all values are smaller
    among: tuple[str, ...] = ()  # the words it may be
    parts: Mapping[str, str] = field(default_factory=dict)  # of keys below it with another role
    tip: Any = None  # to type instead of a wrong value, where the default is none

    def check(self, name: str, value: Any, error: type[UserError], tip: Any = None) -> None:
        """Refuse a value out of range, with a `tip` what to type; null is in every range."""
        if self.among and value not in self.among:
            raise error(
                f"{name}={value}: expected one of {' '.join(self.among)}"
                f"{suggest(str(value), self.among)}"
            )
        if value is None or isinstance(value, str):
            return
        least, most = self.least, self.most
        bounds = ((least, ge), (self.above, gt), (most, le), (self.below, lt))
        good = all(bound is None or holds(value, bound) for bound, holds in bounds)
        endless = isinstance(value, float) and not math.isfinite(value)
        if good and not endless:
            return
        if least == 0 and 1 in (most, self.below):
            expected = "a share between 0 and 1" + (", below 1" if self.below == 1 else "")
        elif least is not None and most is not None and most <= 1000:
            expected = f"a number from {least:g} to {most:g}"
        elif self.above is not None:
            expected = f"a number above {self.above:g}"
            expected += "" if self.below is None else f" and below {self.below:g}"
        elif least is None:
            expected = "a finite number"
        else:
            expected = f"a number of at least {least:g}"
            if most is not None and value > least:
                expected = f"at most {int(most):,}".replace(",", " ")
        hint = "" if tip is None else f"; try {name}={tip}"
        raise error(f"{name}={value}: expected {expected}{hint}")


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by dotted key; an empty mapping is a value."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        inner = isinstance(value, Mapping) and value
        found |= flatten(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return found


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return both values of each dotted key in which nested mappings differ, None for none."""
    a, b = flatten(one), flatten(other)
    return {k: (a.get(k), b.get(k)) for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)}


@functools.cache
def keys_of(cls: Any) -> dict[str, tuple[Any, Key]]:
    """Return the type and the `Key` of every field of a class of options."""
    hints, found = typing.get_type_hints(cls, include_extras=True), {}
    for name in (f.name for f in dataclasses.fields(cls)):
        hint = hints[name]
        declared = next((k for k in getattr(hint, "__metadata__", ()) if isinstance(k, Key)), None)
        plain = typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint
        found[name] = (plain, declared or Key())
    return found


def check_ranges(options: Any, where: str = "", error: type[UserError] = ConfigError) -> None:
    """Refuse values out of the ranges that their keys declare, nested dataclasses included."""
    for name, (kind, key) in keys_of(options.__class__).items():
        value = getattr(options, name)
        default = options.__dataclass_fields__[name].default
        if dataclasses.is_dataclass(kind):
            check_ranges(value, f"{where}{name}.", error)
            continue
        wanted = set(typing.get_args(kind) or (kind,)) - {type(None)}
        tip = default if key.tip is None else key.tip
        is_whole = wanted == {int}
        # A word such as no would count as true.
        if wanted == {bool} and not isinstance(value, bool):
            raise error(f"{where}{name}={value}: expected true or false")
        refused = (str, bool, float) if is_whole else (str, bool)
        if wanted <= {int, float} and isinstance(value, refused):
            what = "a whole number" if is_whole else "a number"
            hint = f"; try {where}{name}={tip}" if isinstance(tip, int | float) else ""
            raise error(f"{where}{name}={value}: expected {what}{hint}")
        key.check(where + name, value, error, None if error is ConfigError else tip)


def build(cls: Any, values: Any, where: str = "") -> Any:
    """Make a dataclass from a mapping; refuse unknown keys and wrong types by name."""
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{where.rstrip('.') or 'the config'} must be a mapping of keys, got {values!r}"
        )
    fields = keys_of(cls)
    for key in values:
        if key not in fields:
            raise ConfigError(f"unknown key {where}{key}{suggest(str(key), fields)}")
    for f in dataclasses.fields(cls):
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and f.name not in values:
            raise ConfigError(f"missing key {where}{f.name}")
    return cls(**{k: _convert(fields[k][0], v, where + k) for k, v in values.items()})


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return build(hint, value, where + ".")
    if origin in (typing.Union, types.UnionType):
        for option in inner:
            with contextlib.suppress(ConfigError):
                return _convert(option, value, where)
    elif origin is tuple and isinstance(value, list | tuple):
        return tuple(_convert(inner[0], item, where) for item in value)
    elif origin is dict and isinstance(value, Mapping):
        return dict(value)
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif hint is Any or type(value) is hint:
        return value
    if hint is int and isinstance(value, float) and value.is_integer():
        raise ConfigError(f"{where}={value!r}: expected a whole number; type {where}={int(value)}")
    shown, tip = "null" if value is None else repr(value), ""
    if hint in (str, str | None) and type(value) in (int, float):  # a folder may be called 2026
        tip = f"; type \"{where}='{value}'\""
    raise ConfigError(f"{where}={shown}: expected {_type_name(hint)}{tip}")


_TYPES = {int: "a whole number", float: "a number", str: "a word", bool: "true or false"}


def _type_name(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(option) for option in typing.get_args(hint))
    if origin is tuple:
        return "a list such as [0.9,0.999]"
    return _TYPES.get(hint) or ("null" if hint is type(None) else str(hint))
