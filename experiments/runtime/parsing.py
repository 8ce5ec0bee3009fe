"""Plain values out of text that anybody may have written: JSON, YAML, numbers (no torch here).

The parsers of both recurse: deep nesting is a RecursionError in one, a segmentation fault in the
other, and often only in what walks the value later. Python refuses to read or print whole numbers
of more than 4300 digits, and a float holds none of more than 308. An alias of aliases makes
gigabytes of a few lines. Nothing that this suite writes comes near the bounds here.
"""

import errno
import functools
import json
import math
import re
import sys
from pathlib import Path
from typing import Any, TypeGuard

from routing.errors import UserError

DEPTH = 64
DIGITS = 100
VALUES = 200_000  # of a YAML document, aliases written out
_LONG = re.compile(rf"[0-9_]{{{DIGITS + 1}}}")


class Malformed(UserError):
    """A text that is no JSON, YAML or number, or more of it than any file of ours holds."""


def whole(text: object, what: str = "", error: type[UserError] = Malformed) -> int:
    """Return the whole number that `text` says in at most 18 ASCII digits, with a sign or without.

    Where it says something else, `error` is raised, and `what` is named in it, such as `seed=`.
    """
    if not re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", str(text)):
        raise error(f"{what}{_brief(text)}: expected a whole number of at most 18 digits")
    return int(str(text))


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number (a truth value is none)."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    # Not math.isfinite, which stops at a whole number of 400 digits.
    return abs(value) <= sys.float_info.max


def bytes_of(path: Path) -> bytes:
    """Return the bytes of a file; an `OSError` also for a pipe or a device, which may not end."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EEXIST, "it is no file", str(path))
    return path.read_bytes()


def json_of(text: str | bytes, what: str = "the text") -> Any:
    """Return the value of a JSON text, UTF-8 where it is bytes; `what` is named in a message.

    Raises:
        Malformed: No JSON, nested deeper than `DEPTH`, or a number of more than `DIGITS` digits.
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
    """Return a loader of plain types that reads 4:00:00 and 010 as texts, not in base 60 and 8.

    With `numbers_as_text` only null, true and false are more than text.
    """
    import yaml

    class Plain(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        """With libyaml, where PyYAML was built with it."""

    numbers = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
    Plain.yaml_implicit_resolvers = {
        first: [
            (tag, re.compile(r"(?!.*:|[-+]?0[0-9_])" + p.pattern, p.flags) if tag in numbers else p)
            for tag, p in patterns
        ]
        for first, patterns in Plain.yaml_implicit_resolvers.items()
    }
    if numbers_as_text:
        plain = {
            "tag:yaml.org,2002:null": None,
            "tag:yaml.org,2002:merge": None,
            "tag:yaml.org,2002:bool": re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"),
        }
        Plain.yaml_implicit_resolvers = {
            first: [(tag, plain[tag] or p) for tag, p in patterns if tag in plain]
            for first, patterns in Plain.yaml_implicit_resolvers.items()
        }
    return Plain


def yaml_of(text: str, what: str = "the text", numbers_as_text: bool = False) -> Any:
    """Return the value of a YAML document, of plain types alone; `what` is named in a message.

    With `numbers_as_text` numbers, dates, yes and no stay as they are written: YAML 1.1 reads 0123
    as 83, 1_000 as 1000 and no as false.

    Raises:
        Malformed: No YAML, nested deeper than `DEPTH`, a number of more than `DIGITS` digits, or
            aliases that make more than `VALUES` values.
    """
    import yaml

    loader = _loader(numbers_as_text)
    try:
        open_ones: list[list[str | None] | None] = []  # of each mapping its keys and values in turn
        for event in yaml.parse(text, Loader=loader):
            if isinstance(event, yaml.CollectionEndEvent):
                turns = open_ones.pop()
                keys = [key for key in (turns or [])[::2] if key is not None]
                if len(set(keys)) < len(keys):
                    twice = next(key for key in keys if keys.count(key) > 1)
                    raise ValueError(f"{twice!r} stands twice in a mapping")
            elif isinstance(event, yaml.NodeEvent):
                if open_ones and (inside := open_ones[-1]) is not None:
                    inside.append(event.value if isinstance(event, yaml.ScalarEvent) else None)
                if isinstance(event, yaml.CollectionStartEvent):
                    open_ones.append([] if isinstance(event, yaml.MappingStartEvent) else None)
            if len(open_ones) > DEPTH:
                raise ValueError(f"nested deeper than {DEPTH}")
        value = yaml.load(text, Loader=loader)
        _check(value, VALUES)
        return value
    except (
        yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, OverflowError,
        RecursionError,
    ) as error:  # fmt: skip
        # Tags such as !!int and !!timestamp raise whatever their text trips over.
        raise Malformed(f"{what} is not YAML ({_reason(error)})") from None


def _check(value: Any, most: float = math.inf) -> None:
    """Walk a value level by level, without recursion: depth, number of values, digits."""
    level, seen = [value], 1
    for _ in range(DEPTH + 1):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += [*item, *item.values()]
            elif isinstance(item, list | tuple | set):
                below += item
            elif isinstance(item, int) and abs(item) >= 10**DIGITS:
                raise ValueError(f"a number of more than {DIGITS} digits")
            if seen + len(below) > most:
                raise ValueError(f"more than {most} values once its aliases are written out")
        if not below:
            return
        level, seen = below, seen + len(below)
    raise ValueError(f"nested deeper than {DEPTH}, or holds itself")


def check_word(word: str) -> None:
    """Refuse a `key=value` word that another parser (Hydra's) would trip over.

    Raises:
        Malformed: It nests deeper than `DEPTH`, has a number of more than `DIGITS` digits, or bytes
            that are not UTF-8.
    """
    if any("\ud800" <= sign <= "\udfff" for sign in word):
        said = word.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        advice = "rename what has other bytes in its name"
        if sys.getfilesystemencoding() != "utf-8":  # LANG=C without Python's own remedy
            advice = "set PYTHONUTF8=1, since this locale has Python read words as ASCII"
        raise Malformed(f"{_brief(said)}: expected UTF-8; {advice}")
    depth = deepest = 0
    for sign in word:
        depth += (sign in "[{(") - (sign in "]})")
        deepest = max(deepest, depth)
    if deepest > DEPTH:
        raise Malformed(f"{_brief(word)}: brackets are nested deeper than {DEPTH}")
    if _LONG.search(word):
        raise Malformed(f"{_brief(word)}: expected numbers of at most {DIGITS} digits")


def _brief(text: object) -> str:
    said = str(text)
    return said if len(said) <= 60 else f"{said[:40]}... ({len(said)} characters)"


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return f"nested deeper than {DEPTH}"
    if "set_int_max_str_digits" in str(error):
        return f"a number of more than {DIGITS} digits"
    said = " ".join(str(error).split()) or type(error).__name__
    return said if len(said) <= 200 else f"{said[:200]}..."
