"""Options' types, ranges and words: declared in dataclasses, checked alike (no torch here)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import numbers
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import ge, gt, le, lt
from typing import Any

from routing.errors import UserError, suggest


class ConfigError(UserError):
    """A key, a value or a combination that cannot be run."""


_TYPES = {
    int: "a whole number", float: "a number", str: "a word", bool: "true or false",
    type(None): "null",
}  # fmt: skip
# Words for a truth value that YAML or other programs know and Hydra does not.
_TRUTH_WORDS = dict.fromkeys(("on", "yes", "y", "t", "1"), "true") | dict.fromkeys(
    ("off", "no", "n", "f", "0", "none", "null"), "false"
)
_BOUNDS = (("of at least", ge), ("above", gt), ("at most", le), ("below", lt))


@dataclass(frozen=True)
class Key:
    """What is declared of an option beside its type, as `Annotated[int, Key(...)]`.

    Its role is what the key decides; hash, grouping of runs, budgets and display names follow:

        learns   what is learnt: other values are another experiment
        routes   what is done to the tokens while training: the treatment that tables compare
        scores   how samples are made and measured
        reports  where and how a run computes and what it leaves on disk: the same run

    The range is that of numbers, `among` that of words; of a list it is each value's.
    """

    role: str = "learns"
    least: float | None = None  # the smallest value
    above: float | None = None  # all values are larger
    most: float | None = None  # the largest value
    below: float | None = None  # all values are smaller
    among: tuple[str, ...] = ()  # the words it may be
    parts: Mapping[str, str] = field(default_factory=dict)  # of keys below it with another role
    tip: Any = None  # to type instead of a wrong value, where the default is none

    def holds(self, value: Any) -> bool:
        """Return whether a value of the right type is in range; null and a truth value always are.

        A number has to be finite.
        """
        if isinstance(value, list | tuple):
            return all(map(self.holds, value))
        if isinstance(value, str):
            return not self.among or value in self.among
        if not isinstance(value, int | float) or isinstance(value, bool):
            return True
        ends = zip(_BOUNDS, (self.least, self.above, self.most, self.below), strict=True)
        finite = isinstance(value, int) or math.isfinite(value)
        return finite and all(bound is None or fits(value, bound) for (_, fits), bound in ends)

    def expected(self, kind: Any) -> str:
        """Return in words what a value of this type has to be."""
        origin, inner = typing.get_origin(kind), typing.get_args(kind)
        if origin in (typing.Union, types.UnionType):
            return " or ".join(map(self.expected, inner))
        if origin is tuple:
            count = "" if inner[-1] is ... else f" of {len(inner)}"
            return f"a list{count}, each of them {self.expected(inner[0])}"
        if kind is str and self.among:
            return f"{'one of ' * (len(self.among) > 1)}{' '.join(self.among)}"
        if kind not in (int, float):
            return _TYPES.get(kind, "a mapping of keys")
        ends = zip(_BOUNDS, (self.least, self.above, self.most, self.below), strict=True)
        bounds = [f"{words} {bound:,}" for (words, _), bound in ends if bound is not None]
        return f"{_TYPES[kind]} {' and '.join(bounds)}".rstrip()

    def check(
        self, name: str, value: Any, error: type[UserError], kind: Any = str, tip: Any = None
    ) -> Any:
        """Return a plain value as the type `kind`; refuse another type and what is out of range."""
        with contextlib.suppress(TypeError):
            if self.holds(made := _convert(kind, value, name)):
                return made
        shown, kinds = _as_typed(value), {kind, *typing.get_args(kind)}
        if isinstance(value, float) and value.is_integer() and int in kinds:
            tip = int(value)
        elif bool in kinds:  # the default may be the opposite of what was meant
            tip = _TRUTH_WORDS.get(str(shown).lower())
        hint = "" if tip is None else f"; try {name}={tip}"
        is_truth = bool in kinds and tip is not None
        wrong = value if isinstance(value, list | tuple) else [value]
        if self.among and wrong and not is_truth:
            hint = suggest(str(next((w for w in wrong if not self.holds(w)), value)), self.among)
            # YAML reads a bare yes, no, on or off as a truth value.
            for word in {"yes", "no", "on", "off"} & {*self.among}:
                if isinstance(value, bool) and _TRUTH_WORDS[word] == shown:
                    hint = f"; in YAML, quote the word: '{word}'"
        elif str in kinds and type(value) in (int, float):  # a folder may be called 2026
            hint = f"; type \"{name}='{value}'\""
        raise error(f"{name}={shown}: expected {self.expected(kind)}{hint}")


def _as_typed(value: Any) -> Any:
    """Return a value as a command line spells it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return value


def _convert(kind: Any, value: Any, name: str) -> Any:
    """Return a plain value as a declared type; a `TypeError` where it is none."""
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return build(kind, value, f"{name}.")
    if origin in (typing.Union, types.UnionType):
        # null first: a mapping that is none would be refused.
        for option in sorted(inner, key=dataclasses.is_dataclass):
            with contextlib.suppress(TypeError):
                return _convert(option, value, name)
    elif origin is tuple and isinstance(value, list | tuple):
        if inner[-1] is ... or len(inner) == len(value):
            return tuple(_convert(inner[0], item, name) for item in value)
    elif origin is dict and isinstance(value, Mapping):
        return dict(value)
    elif kind in (int, float) and not isinstance(value, bool):  # numpy's numbers too
        if isinstance(value, numbers.Integral if kind is int else numbers.Real):
            return kind(value)
    elif kind is Any or type(value) is origin:
        return value
    raise TypeError


@functools.cache
def keys_of(cls: Any) -> dict[str, tuple[Any, Key]]:
    """Return the type and the `Key` of every field of a class of options."""
    hints, found = typing.get_type_hints(cls, include_extras=True), {}
    for name in (f.name for f in dataclasses.fields(cls)):
        hint = hints[name]
        declared = next((k for k in getattr(hint, "__metadata__", ()) if isinstance(k, Key)), None)
        plain = typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint
        if typing.get_origin(plain) is typing.Literal:
            plain, declared = str, Key(among=typing.get_args(plain))
        found[name] = (plain, declared or Key())
    return found


def check_ranges(options: Any, where: str, error: type[UserError]) -> None:
    """Refuse numbers, truth values and words that their keys' types and ranges do not allow.

    For options that are made as any dataclass is; `build` checks what it makes itself.
    """
    for name, (kind, key) in keys_of(options.__class__).items():
        value = getattr(options, name)
        plain = {kind, *typing.get_args(kind)} & {int, float, bool}
        if plain or key.among:
            key.check(where + name, value, error, kind, _tip(options, name, key))


def _tip(cls: Any, name: str, key: Key) -> Any:
    """What to type for a number that is refused: the key's tip, or its default."""
    default = cls.__dataclass_fields__[name].default
    return default if key.tip is None and isinstance(default, int | float) else key.tip


def build(cls: Any, values: Any, where: str = "") -> Any:
    """Make a dataclass from a mapping; refuse unknown keys and wrong values by name."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where or 'the config'} must be a mapping of keys, got {values!r}")
    fields, made = keys_of(cls), {}
    for name, value in values.items():
        if name not in fields:
            raise ConfigError(f"unknown key {where}{name}{suggest(str(name), fields)}")
        kind, key = fields[name]
        made[name] = key.check(where + name, value, ConfigError, kind, _tip(cls, name, key))
    for f in dataclasses.fields(cls):
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and f.name not in values:
            raise ConfigError(f"missing key {where}{f.name}")
    return cls(**made)


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
