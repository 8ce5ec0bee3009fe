"""Parse text as plain values: JSON, YAML, numbers (no torch here)."""

import errno
import functools
import json
import os
import re
import stat
import sys
from pathlib import Path
from typing import Any, TypeGuard

from routing.errors import UserError

# The parsers of YAML and of Hydra recurse, and Python refuses to print integers of 4,300 digits.
DEPTH = 64
DIGITS = 100
_LONG = re.compile(rf"[0-9_]{{{DIGITS + 1}}}")


class Malformed(UserError):
    """Text that is not JSON, YAML or a number."""


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
        raise OSError(errno.EEXIST, "not a regular file", str(path))


def is_own(path: Path) -> bool:
    """Whether a file or folder (no link) is this user's, and nobody else may write to it."""
    status = path.lstat()
    if not hasattr(os, "getuid"):  # Windows
        return True
    is_private = status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return is_private and not stat.S_ISLNK(status.st_mode)


def bytes_of(path: Path) -> bytes:
    """Read a file; pipes and devices, which may not end, are an `OSError` too."""
    check_file(path)
    return path.read_bytes()


def json_of(text: str | bytes, what: str = "the text") -> Any:
    """Parse JSON, in UTF-8 if given as bytes; errors name `what`.

    Raises:
        Malformed: Not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
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

    def mapping(loader: Any, node: Any) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"{key!r} appears twice in a mapping")
        return loader.construct_mapping(node, deep=True)

    PlainLoader.add_constructor("tag:yaml.org,2002:map", mapping)
    return PlainLoader


def yaml_of(text: str, what: str = "the text", numbers_as_text: bool = False) -> Any:
    """Parse a YAML document of plain types; errors name `what`.

    With `numbers_as_text` numbers, dates, yes and no stay as they are written: YAML 1.1 reads 0123
    as 83, 1_000 as 1000 and no as false.

    Raises:
        Malformed: Not YAML, or a key that occurs twice in a mapping.
    """
    import yaml

    loader = _loader(numbers_as_text)
    try:
        depth = 0
        for event in yaml.parse(text, Loader=loader):  # libyaml recurses without a limit of its own
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > DEPTH:
                raise ValueError(f"nested deeper than {DEPTH}")
        return yaml.load(text, Loader=loader)
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, OverflowError,
            RecursionError) as error:  # fmt: skip
        # Tags such as !!int and !!timestamp raise the errors of the conversions behind them.
        raise Malformed(f"{what} is not YAML ({_reason(error)})") from None


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
        return "nested too deeply"
    if "set_int_max_str_digits" in str(error):
        return f"a number of more than {DIGITS} digits"
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:200]}..."
