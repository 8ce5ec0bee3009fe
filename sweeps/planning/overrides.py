"""A sweep's values: typed as `key=value` words, filled into texts, read from anybody's files."""

import re
from collections.abc import Iterable, Mapping, Sequence
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from experiments.runtime.parsing import check_word, is_number
from sweeps import SweepError

KEY = re.compile(r"[A-Za-z_][\w.]*\Z")
Record = TypeVar("Record")
_PLAIN = re.compile(r"[\w+./@:%-]+", re.ASCII)


class Typed(str):
    """A value as it was typed: passed on untouched, so Hydra's quoting stays the user's."""


def parse(words: Iterable[str]) -> dict[str, list[Typed]]:
    """Return values by key of `backbone=dit,mamba` (a comma in brackets or quotes stays).

    Raises:
        SweepError: A word is no `key=value`, a key stands twice, or it is a grid file's `seeds`.
    """
    found: dict[str, list[Typed]] = {}
    for word in words:
        check_word(word)
        key, _, text = word.partition("=")
        if not KEY.match(key) or not all(split(text)):
            raise SweepError(
                f"{word!r} is no override; expected key=value or key=A,B, such as backbone=dit"
            )
        if key == "seeds":
            # The grids' files call the list so; on a command line the run's own key stands.
            raise SweepError(f"seeds is a key of a grid's file; type seed={text}")
        if key in found:
            raise SweepError(f"{key} stands twice; give its values as {key}=A,B")
        found[key] = [Typed(part) for part in split(text)]
    return found


def only(key: str, values: Sequence[Typed]) -> str:
    """Return the value of a key that has one, without quotes; `SweepError` for several."""
    if len(values) > 1:
        text = ",".join(values)
        what = f"launch once for each, or quote what has a comma, {key}=\"'{text}'\""
        raise SweepError(f"{key} takes one value, got {text}; {what}")
    return values[0].strip("'\"")


def split(text: str) -> list[str]:
    """Split at commas that stand in no bracket or quote."""
    parts, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "," and depth == 0:
            parts.append("")
            continue
        else:
            depth += (char in "[{(") - (char in "]})")
        parts[-1] += char
    return [part.strip() for part in parts]


def show(value: Any) -> str:
    """Write a value as Hydra reads it on an override's right-hand side."""
    if isinstance(value, Typed):
        return str(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return "[" + ",".join(show(v) for v in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{show(v)}" for k, v in value.items()) + "}"
    if isinstance(value, str) and not _PLAIN.fullmatch(value):
        # Unlike JSON, Hydra reads a backslash as it is but before a quote.
        return '"' + re.sub(r'(\\+)(?="|\Z)', r"\1\1", value).replace('"', r"\"") + '"'
    return str(value)


def same(value: Any, other: Any) -> bool:
    """Whether two values read the same on a command line (`0.5` typed equals 0.5 in a file)."""
    return show(value).strip("'\"") == show(other).strip("'\"")


def fill(text: Any, values: Mapping[str, str]) -> Any:
    """Return a text of a file with its `{name}`s filled in; anything else as it is."""
    for name, value in values.items() if isinstance(text, str) else ():
        if f"{{{name}}}" in text:
            text = text.replace(f"{{{name}}}", value)
    return text


def fits(value: Any, shape: Any) -> bool:
    """Whether a value of a file has a type such as `list[str]`, `dict[str, Any]` or `int | None`.

    A number is finite, a list is as good as a tuple, and a truth value is no number.
    """
    kind, inner = get_origin(shape), get_args(shape)
    if kind is UnionType:
        return any(fits(value, one) for one in inner)
    if kind in (list, tuple):
        return isinstance(value, list | tuple) and all(fits(item, inner[0]) for item in value)
    if kind is not None:  # a mapping
        return isinstance(value, dict) and all(
            fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items()
        )
    return shape is Any or type(value) is shape or (shape is float and is_number(value))


def record(kind: type[Record], values: Any) -> Record:
    """Return a dataclass with the values of a file; `SweepError` if they are not of its types."""
    shapes = get_type_hints(kind)
    try:
        known = {key: values[key] for key in shapes if key in values}
        if all(fits(value, shapes[key]) for key, value in known.items()):
            return kind(**known)
    except TypeError:  # no mapping, or not all that it needs
        pass
    raise SweepError(f"a damaged {kind.__name__} in a sweep's files")
