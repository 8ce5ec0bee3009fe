"""Parse untrusted text as plain values: JSON, YAML, numbers (no torch here).

The parsers of both recurse: deep nesting is a RecursionError in one, a segmentation fault in the
other, and often only in the code that walks the value later. Python refuses to read or print
integers of more than 4300 digits, and a float has at most 308. Nested aliases expand a few lines to
gigabytes. Files of this suite stay far below the limits here.
"""

import errno
import functools
import json
import math
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeGuard

from routing.errors import UserError

DEPTH = 64
DIGITS = 100
VALUES = 200_000  # in a YAML document with expanded aliases
_LONG = re.compile(rf"[0-9_]{{{DIGITS + 1}}}")


class Malformed(UserError):
    """Text that is not JSON, YAML or a number, or exceeds the limits above."""


def whole(text: object, what: str = "", error: type[UserError] = Malformed) -> int:
    """Parse an integer of at most 18 ASCII digits with an optional sign.

    For other text, `error` is raised with a message that starts with `what`, such as `seed=`.
    """
    if not re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", str(text)):
        raise error(f"{what}{_brief(text)}: expected a whole number of at most 18 digits")
    return int(str(text))


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number; a bool is not a number here."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    # Not math.isfinite, which fails for an integer of 400 digits.
    return abs(value) <= sys.float_info.max


def check_file(path: Path) -> None:
    """Raise `OSError` for a pipe, device or folder: opening a pipe waits for a writer for ever."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EEXIST, "it is no file", str(path))


def bytes_of(path: Path) -> bytes:
    """Read a file; pipes and devices, which may not end, are an `OSError` too."""
    check_file(path)
    return path.read_bytes()


def json_of(text: str | bytes, what: str = "the text") -> Any:
    """Parse JSON, in UTF-8 if given as bytes; errors name `what`.

    Raises:
        Malformed: Not JSON, nested deeper than `DEPTH`, or a number of more than `DIGITS` digits.
    """
    try:
        text = text if isinstance(text, str) else text.decode("utf-8")
        value = json.loads(text)
        if text.count("[") + text.count("{") > DEPTH or _LONG.search(text):
            _check(value)
        return value
    except (ValueError, TypeError, RecursionError) as error:
        raise Malformed(f"{what} is not JSON ({_reason(error)})") from None


@functools.cache
def _loader(numbers_as_text: bool = False) -> Any:
    """Return a loader of plain types that reads 4:00:00 and 010 as text, not in base 60 and 8.

    With `numbers_as_text` everything but null, true and false is text.
    """
    import yaml

    class PlainLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        """Uses libyaml if PyYAML was built with it."""

    numbers = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
    plain_patterns: dict[str, re.Pattern[str] | None] = {
        "tag:yaml.org,2002:null": None,
        "tag:yaml.org,2002:merge": None,
        "tag:yaml.org,2002:bool": re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"),
    }
    resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for first, patterns in PlainLoader.yaml_implicit_resolvers.items():
        resolvers[first] = []
        for tag, pattern in patterns:
            if numbers_as_text:
                if tag in plain_patterns:
                    resolvers[first].append((tag, plain_patterns[tag] or pattern))
            elif tag in numbers:
                decimal = re.compile(r"(?!.*:|[-+]?0[0-9_])" + pattern.pattern, pattern.flags)
                resolvers[first].append((tag, decimal))
            else:
                resolvers[first].append((tag, pattern))
    PlainLoader.yaml_implicit_resolvers = resolvers
    return PlainLoader


def yaml_of(text: str, what: str = "the text", numbers_as_text: bool = False) -> Any:
    """Parse a YAML document of plain types; errors name `what`.

    With `numbers_as_text` numbers, dates, yes and no stay as they are written: YAML 1.1 reads 0123
    as 83, 1_000 as 1000 and no as false.

    Raises:
        Malformed: Not YAML, nested deeper than `DEPTH`, a key that occurs twice, a number of more
            than `DIGITS` digits, or aliases that expand to more than `VALUES` values.
    """
    import yaml

    loader = _loader(numbers_as_text)
    try:
        _check_events(yaml.parse(text, Loader=loader))
        value = yaml.load(text, Loader=loader)
        _check(value, VALUES)
        return value
    except (
        yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, OverflowError,
        RecursionError,
    ) as error:  # fmt: skip
        # Tags such as !!int and !!timestamp raise the errors of the conversions behind them.
        raise Malformed(f"{what} is not YAML ({_reason(error)})") from None


def _check_events(events: Iterable[Any]) -> None:
    """Refuse a document that is nested too deeply or has a key twice, before it is built."""
    import yaml

    # For each open mapping its keys and values in turn (None for collections), for sequences None.
    open_collections: list[list[str | None] | None] = []
    for event in events:
        if isinstance(event, yaml.CollectionEndEvent):
            entries = open_collections.pop() or []
            keys = set()
            for key in entries[::2]:
                if key is not None and key in keys:
                    raise ValueError(f"{key!r} appears twice in a mapping")
                keys.add(key)
        elif isinstance(event, yaml.NodeEvent):
            if open_collections and open_collections[-1] is not None:
                text = event.value if isinstance(event, yaml.ScalarEvent) else None
                open_collections[-1].append(text)
            if isinstance(event, yaml.CollectionStartEvent):
                is_mapping = isinstance(event, yaml.MappingStartEvent)
                open_collections.append([] if is_mapping else None)
        if len(open_collections) > DEPTH:
            raise ValueError(f"nested deeper than {DEPTH}")


def _check(value: Any, max_values: float = math.inf) -> None:
    """Check depth, number of values and digits level by level, without recursion."""
    level, count = [value], 1
    for _ in range(DEPTH + 1):
        next_level: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                next_level += [*item, *item.values()]
            elif isinstance(item, list | tuple | set):
                next_level += item
            elif isinstance(item, int) and abs(item) >= 10**DIGITS:
                raise ValueError(f"a number of more than {DIGITS} digits")
            if count + len(next_level) > max_values:
                raise ValueError(f"more than {max_values} values once its aliases are written out")
        if not next_level:
            return
        level, count = next_level, count + len(next_level)
    raise ValueError(f"nested deeper than {DEPTH}, or holds itself")


def check_word(word: str) -> None:
    """Raise `Malformed` for a `key=value` argument that would crash Hydra's parser.

    Raises:
        Malformed: It nests deeper than `DEPTH`, has a number of more than `DIGITS` digits, or bytes
            that are not UTF-8.
    """
    if any("\ud800" <= character <= "\udfff" for character in word):
        escaped = word.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        advice = "rename the file or folder"
        if sys.getfilesystemencoding() != "utf-8":  # LANG=C with Python's UTF-8 mode disabled
            advice = "set PYTHONUTF8=1, since this locale has Python read arguments as ASCII"
        raise Malformed(f"{_brief(escaped)}: expected UTF-8; {advice}")
    depth = max_depth = 0
    for character in word:
        depth += (character in "[{(") - (character in "]})")
        max_depth = max(max_depth, depth)
    if max_depth > DEPTH:
        raise Malformed(f"{_brief(word)}: brackets are nested deeper than {DEPTH}")
    if _LONG.search(word):
        raise Malformed(f"{_brief(word)}: expected numbers of at most {DIGITS} digits")


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)"


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return f"nested deeper than {DEPTH}"
    if "set_int_max_str_digits" in str(error):
        return f"a number of more than {DIGITS} digits"
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:200]}..."
