"""Overrides: parsed from `key=value` arguments, formatted for Hydra, filled into texts."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from backbones.parsing import check_word
from experiments.options.training import PathsOptions
from experiments.runtime.console import printable
from routing.errors import require
from sweeps import SweepError

KEY = re.compile(r"[A-Za-z_][\w.]*\Z")
# With `STAGE:` before the key, which addresses a stage of a grid.
_TYPED_KEY = re.compile(rf"([\w.-]+:)?{KEY.pattern}")
_UNQUOTED = re.compile(r"[\w+./@:%-]+", re.ASCII)


class Typed(str):
    """A value as typed on the command line; passed to Hydra unchanged, with the user's quotes."""


def parse(arguments: Iterable[str]) -> dict[str, list[Typed]]:
    """Return the values of each key (or `STAGE:key`); `backbone=dit,mamba` has two.

    Commas in brackets or quotes do not separate values.

    Raises:
        SweepError: An argument is not `key=value`, a key is repeated, or it is `seeds`.
    """
    values: dict[str, list[Typed]] = {}
    for argument in arguments:
        check_word(argument)
        key, _, text = argument.partition("=")
        require(
            _TYPED_KEY.match(key) and all(split(text)),
            f"{argument!r} is not an override; expected key=value or key=A,B, such as "
            "backbone=dit, or STAGE:key=value for a later stage",
            SweepError,
        )
        require(key != "seeds", f"seeds is a key of grid files; expected seed={text}", SweepError)
        require(
            key not in values,
            f"{key} is given twice; expected {key}=A,B for several values",
            SweepError,
        )
        values[key] = [Typed(part) for part in split(text)]
    return values


def only(key: str, values: Sequence[Typed]) -> str:
    """Return the value of a key that takes one, without its quotes."""
    text = ",".join(values)
    require(
        len(values) == 1,
        f"{key}={text}: {key} takes one value; launch once for each, or quote a value with a "
        f"comma, {key}=\"'{text}'\"",
        SweepError,
    )
    return values[0].strip("'\"")


def runs_root(user: Mapping[str, Sequence[Typed]]) -> Path:
    """Return the absolute folder of the run folders, as typed in `paths.runs` or by default."""
    typed = only("paths.runs", user.get("paths.runs", [Typed(PathsOptions().runs)]))
    folder = Path(typed).expanduser().absolute()
    # A line break would end a line of a job's script, and begin one of the shell's.
    is_plain = printable(folder) == str(folder) and not {"\n", "\t"} & set(str(folder))
    require(
        is_plain, f"paths.runs={folder}: expected a path without control characters", SweepError
    )
    return folder


def split(text: str) -> list[str]:
    """Split at commas outside of brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "," and depth == 0:
            parts.append("")
            continue
        elif char in "[{(":
            depth += 1
        elif char in "]})":
            depth -= 1
        parts[-1] += char
    return [part.strip() for part in parts]


def format_value(value: Any) -> str:
    """Format a value as the right-hand side of a Hydra override."""
    if isinstance(value, Typed):
        return str(value)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(format_value, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{format_value(value[key])}" for key in value) + "}"
    if isinstance(value, str) and not _UNQUOTED.fullmatch(value):
        # Unlike in JSON, a backslash is special to Hydra only before a quote.
        return '"' + re.sub(r'(\\+)(?="|\Z)', r"\1\1", value).replace('"', r"\"") + '"'
    return str(value)


def format_overrides(values: Mapping[str, Any]) -> list[str]:
    """Format overrides by key as arguments, `key=value`."""
    return [f"{key}={format_value(value)}" for key, value in values.items()]


def is_any_of(value: Any, candidates: Iterable[Any]) -> bool:
    """Return whether a value reads the same as a candidate: 0.5 in a file and as typed do."""
    texts = [format_value(candidate).strip("'\"") for candidate in candidates]
    return format_value(value).strip("'\"") in texts


def without(overrides: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Return overrides without some keys."""
    return {key: value for key, value in overrides.items() if key not in keys}


def fill(text: Any, values: Mapping[str, str]) -> Any:
    """Replace `{name}` in a text by the value of that name; return anything else unchanged."""
    if not isinstance(text, str):
        return text
    for name, value in values.items():
        if f"{{{name}}}" in text:  # `replace` would make plain text of a value as typed
            text = text.replace(f"{{{name}}}", value)
    return text
