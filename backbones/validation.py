"""Validate plain values against a dataclass of options (no torch here).

Options are plain dataclasses whose fields are annotated with constraints and a comment:

    lr: Annotated[float, Gt(0), "Learning rate."] = 1e-4

`validate` builds one from the values of a YAML file or a command line. Types are strict: a bool is
not a number, `2.0` is not an integer, and text is never converted.
"""

import dataclasses
import functools
import json
import math
import numbers
import types
import typing
from collections.abc import Collection, Mapping
from typing import Annotated, Any

import annotated_types
import pydantic
import pydantic_core

from routing.errors import UserError, require, suggest


class OptionError(UserError):
    """A key or a value that a dataclass of options does not accept."""


@dataclasses.dataclass(frozen=True)
class Choices:
    """The words that an `Annotated[str, Choices(...)]` allows, if they are computed.

    Attributes:
        words: The words.
        advice: What an error adds for a word that resembles none of them.
    """

    words: tuple[str, ...]
    advice: str = ""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Validate as one of the words."""
        return pydantic_core.core_schema.literal_schema(list(self.words))


@dataclasses.dataclass(frozen=True)
class Field:
    """One field of a dataclass of options.

    Attributes:
        name: The key.
        type: Its annotation without the metadata.
        annotation: Its annotation with constraints.
        default: Its default; `dataclasses.MISSING` where a value is required.
        comment: What it does, for `--help`.
        metadata: All other metadata of its annotation.
    """

    name: str
    type: Any
    annotation: Any
    default: Any
    comment: str
    metadata: tuple[Any, ...]


@functools.cache
def fields_of(options: type) -> dict[str, Field]:
    """Return the fields of a dataclass of options by name."""
    annotations = typing.get_type_hints(options, include_extras=True)
    fields = {}
    for field in dataclasses.fields(options):
        annotation = annotations[field.name]
        metadata: tuple[Any, ...] = getattr(annotation, "__metadata__", ())
        comments = [item for item in metadata if isinstance(item, str)]
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        fields[field.name] = Field(
            name=field.name,
            type=typing.get_args(annotation)[0] if metadata else annotation,
            annotation=annotation,
            default=default,
            comment=" ".join(comments),
            metadata=tuple(item for item in metadata if not isinstance(item, str)),
        )
    return fields


def validate(
    options: type, values: Any, prefix: str = "", known_elsewhere: Collection[str] = ()
) -> Any:
    """Build a dataclass of options from plain values.

    Args:
        options: The dataclass; a method `check_consistency()`, if any, refuses combinations.
            `prefix` is put before its message where that does not begin with it.
        values: A mapping of keys, as YAML or JSON holds them.
        prefix: What stands before each key in an error, as in `train.`.
        known_elsewhere: Further keys to suggest for a mistyped one.

    Raises:
        OptionError: An unknown key, a missing key, or a value of another type or range.
    """
    owner = prefix.rstrip(".") or "the configuration"
    require(
        isinstance(values, Mapping),
        f"{owner}={show(values)}: expected a mapping of keys",
        OptionError,
    )
    fields = fields_of(options)
    for key in values:
        if key not in fields:
            closest = suggest(str(key), [*fields, *known_elsewhere])
            raise OptionError(f"unknown key {prefix}{show(key)}{closest}")
    for name, field in fields.items():
        if field.default is dataclasses.MISSING and name not in values:
            raise OptionError(f"missing key {prefix}{name}: expected {describe(field.annotation)}")
    validated = {}
    for key, value in values.items():
        validated[key] = validate_value(fields[key].annotation, value, prefix + key)
    instance = options(**validated)
    if hasattr(instance, "check_consistency"):
        try:
            instance.check_consistency()
        except UserError as error:
            if str(error).startswith(prefix):
                raise
            raise type(error)(f"{prefix}{error}") from None
    return instance


def validate_value(annotation: Any, value: Any, name: str) -> Any:
    """Return a plain value as the type of an annotation.

    Raises:
        OptionError: The value has another type or is out of range; the message has its `name`.
    """
    options = _dataclass_in(annotation)
    if options is not None and isinstance(value, Mapping):
        return validate(options, value, f"{name}.")
    if options is not None and isinstance(value, options):
        return value
    is_annotated = typing.get_origin(annotation) is Annotated
    plain_type = typing.get_args(annotation)[0] if is_annotated else annotation
    if options is not None and options is plain_type:  # no alternative to the dataclass
        raise _wrong_value(annotation, value, name)
    adapter = _adapter(annotation)
    try:
        # JSON mode, because YAML and command lines have lists where options have tuples.
        return adapter.validate_json(json.dumps(value, default=_plain_number))
    except (pydantic.ValidationError, TypeError, ValueError, RecursionError):
        raise _wrong_value(annotation, value, name) from None


def _wrong_value(annotation: Any, value: Any, name: str) -> OptionError:
    expected = describe(annotation)
    if _has_infinity(value):
        expected = expected.replace("a number", "a finite number")
    hint = _suggest_choice(annotation, value)
    for constraint in getattr(annotation, "__metadata__", ()):
        if not hint and isinstance(constraint, Choices) and constraint.advice:
            hint = f"; {constraint.advice}"
    return OptionError(f"{name}={show(value)}: expected {expected}{hint}")


def check_choice(value: Any, words: Collection[str], name: str) -> None:
    """Raise `OptionError` unless the value is one of the words.

    Raises:
        OptionError: The message has its `name`, the words, and the closest of them.
    """
    validate_value(Annotated[str, Choices(tuple(words))], value, name)


def describe(annotation: Any, bounds: str = "") -> str:
    """Describe the values that an annotation allows; `bounds` limit its numbers."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        limits = [bounds] if bounds else []
        for constraint in arguments[1:]:
            if isinstance(constraint, Choices):
                return _one_of(constraint.words)
            for kind, (attribute, words) in _BOUNDS.items():
                if isinstance(constraint, kind):
                    limits.append(f"{words} {getattr(constraint, attribute):,}")
        return describe(arguments[0], " and ".join(limits))
    if origin in (typing.Union, types.UnionType):
        alternatives = [describe(argument, bounds) for argument in arguments]
        for item in alternatives:
            # A long list of choices is printed once.
            if item.startswith("one of ") and f"a list, each {item}" in alternatives:
                return f"{item}, or a list of these"
        return " or ".join(dict.fromkeys(alternatives))
    if origin is typing.Literal:
        return _one_of(arguments)
    if origin in (tuple, list):
        length = f" of {len(arguments)}" if origin is tuple and arguments[-1] is not ... else ""
        return f"a list{length}, each {describe(arguments[0])}"
    if annotation in (int, float) and bounds:
        return f"{_TYPES[annotation]} {bounds}"
    if dataclasses.is_dataclass(annotation):
        return f"a mapping of {', '.join(fields_of(typing.cast(type, annotation)))}"
    return _TYPES.get(origin or annotation, "a mapping of keys")


def show(value: Any) -> str:
    """Return a value as it is typed on a command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(show(item) for item in value)}]"
    # A message is one line: line breaks and control characters are escaped.
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(value))


def choices(annotation: Any) -> list[str]:
    """Return the literal words that an annotation allows."""
    if isinstance(annotation, Choices):
        return list(annotation.words)
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return [value for value in arguments if isinstance(value, str)]
    words = []
    for argument in [*arguments, *getattr(annotation, "__metadata__", ())]:
        words += choices(argument)
    return words


def _one_of(values: Any) -> str:
    words = ", ".join(show(value) for value in values)
    return words if len(values) == 1 else f"one of {words}"


_TYPES = {
    int: "an integer",
    float: "a number",
    str: "text",
    bool: "true or false",
    type(None): "null",
}
_BOUNDS = {
    annotated_types.Ge: ("ge", ">="),
    annotated_types.Gt: ("gt", ">"),
    annotated_types.Le: ("le", "<="),
    annotated_types.Lt: ("lt", "<"),
    annotated_types.MultipleOf: ("multiple_of", "a multiple of"),
}


@functools.cache
def _adapter(annotation: Any) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(
        annotation, config=pydantic.ConfigDict(strict=True, allow_inf_nan=False)
    )


def _plain_number(value: Any) -> int | float:
    """Convert a NumPy number to Python's, for `json.dumps`."""
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"{type(value).__name__} is not a plain value")


def _has_infinity(value: Any) -> bool:
    """Whether a value is infinite or NaN, or a list that contains such a value."""
    if isinstance(value, list | tuple):
        return any(_has_infinity(item) for item in value)
    return isinstance(value, float) and not math.isfinite(value)


def _dataclass_in(annotation: Any) -> Any:
    """Return the dataclass in an annotation, also in a union, or None."""
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return annotation
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _dataclass_in(arguments[0])
    if origin in (typing.Union, types.UnionType):
        for argument in arguments:
            options = _dataclass_in(argument)
            if options is not None:
                return options
    return None


def _suggest_choice(annotation: Any, value: Any) -> str:
    items = value if isinstance(value, list | tuple) else [value]
    allowed = choices(annotation)
    for item in items:
        if item not in allowed and allowed:
            return suggest(str(item), allowed)
    return ""
