"""A user's `key=value` words: commas make lists of values, `cluster.*` goes to the resources."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from routing.parsing import check_word
from sweeps import SweepError

KEY = re.compile(r"[A-Za-z_][\w.]*\Z")
_PLAIN = re.compile(r"[\w+./@:%-]+", re.ASCII)


@dataclass(frozen=True)
class Typed:
    """A value as it was typed: passed on untouched, so Hydra's quoting stays the user's."""

    text: str


def parse(words: Iterable[str]) -> dict[str, list[Typed]]:
    """Return values by key of `backbone=dit,mamba` (a comma in brackets or quotes stays).

    Raises:
        SweepError: A word is no `key=value`, a key stands twice, or it is a grid file's `seeds`.
    """
    found: dict[str, list[Typed]] = {}
    for word in words:
        check_word(word)
        key, equals, text = word.partition("=")
        if not equals or not KEY.match(key):
            raise SweepError(
                f"{word!r} is no override; expected key=value, such as backbone=dit,mamba"
            )
        if key == "seeds":
            # The grids' files call the list so; on a command line the run's own key stands.
            raise SweepError(f"seeds is a key of a grid's file; type seed={text or '0,1,2'}")
        if key in found:
            raise SweepError(f"{key} stands twice; give its values as {key}=A,B")
        found[key] = [Typed(part) for part in split(text)]
        if any(not value.text for value in found[key]):
            raise SweepError(f"{word!r} has an empty value; expected {key}=VALUE or {key}=A,B")
    return found


def only(key: str, values: Sequence[Typed]) -> str:
    """Return the value of a key that has one, without quotes; `SweepError` for several."""
    if len(values) > 1:
        text = ",".join(value.text for value in values)
        what = f"launch once for each, or quote what has a comma, {key}=\"'{text}'\""
        raise SweepError(f"{key} takes one value, got {text}; {what}")
    return values[0].text.strip("'\"")


def split(text: str) -> list[str]:
    """Split at commas that stand in no bracket or quote."""
    parts, depth, quote, start = [], 0, "", 0
    for i, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "[{(":
            depth += 1
        elif char in "]})":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [part.strip() for part in [*parts, text[start:]]]


def show(value: Any) -> str:
    """Write a value as Hydra reads it on an override's right-hand side."""
    if isinstance(value, Typed):
        return value.text
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
