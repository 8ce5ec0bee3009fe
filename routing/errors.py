"""Errors that a user can cause and mend: one sentence each, never a traceback (no torch here)."""

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn


class UserError(ValueError):
    """Wrong input from a user: the message says what is wrong, what was expected and what to type.

    Commands print the message on one line and exit with code 2; libraries raise it as a
    `ValueError`.
    """


def suggest(word: str, options: Iterable[str]) -> str:
    """Return `"; did you mean X?"` for the options closest to `word`, or an empty string."""
    ranks = {str(option): _likeness(str(word).lower(), str(option).lower()) for option in options}
    best = max(ranks.values(), default=0.0)
    close = [option for option, rank in ranks.items() if rank == best >= 0.55]
    return f"; did you mean {' or '.join(close[:3])}?" if close else ""


def _likeness(word: str, option: str) -> float:
    """How alike two keys or values are, 0 to 1: in their letters, beginning, end or initials.

    `backbon` is like `backbone`, `train.learning_rate` like `train.lr`, `max_steps` like `steps`.
    """
    (group, _, typed), (other, _, name) = word.rpartition("."), option.rpartition(".")
    alike = difflib.SequenceMatcher(None, name, typed).ratio()
    short, long = sorted((typed, name), key=len)
    if len(short) > 1 and short == "".join(part[:1] for part in long.split("_")):
        alike = 0.9
    elif len(short) > 2 and long.startswith(short):
        alike = max(alike, 0.87)
    elif len(short) > 2 and long.endswith(f"_{short}"):
        alike = max(alike, 0.83)
    if group == other:
        return alike
    # A bare name may mean a key of any group, less likely than one without a group.
    letters = difflib.SequenceMatcher(None, option, word).ratio()
    return max(letters, alike - (0.3 if group else 0.02))


def one_of(
    key: str, value: str, options: Sequence[str], error: type[UserError] = UserError
) -> None:
    """Raise `error` unless `value`, given for `key`, is one of the options."""
    if value not in options:
        raise error(
            f"{key} {value!r}: expected one of {', '.join(options)}{suggest(value, options)}"
        )


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are one sentence, like every other wrong input."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Refuse `--option=--`, of which argparse makes an empty list instead of a value."""
        words = list(sys.argv[1:] if args is None else args)
        for word in words:
            option, equals, value = word.partition("=")
            if option.startswith("-") and equals and value == "--":
                self.error(f"argument {option}: expected a value, not --")
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise `UserError` instead of printing the usage and exiting."""
        unknown = message.partition("unrecognized arguments: ")[2].split()
        if flags := [word.partition("=")[0] for word in unknown if word.startswith("-")]:
            message += suggest(flags[0], self._option_string_actions)
        if choice := re.search(r"invalid choice: '?(.*?)'? \(choose from (.*)\)", message):
            message += suggest(choice[1], choice[2].replace("'", "").split(", "))
        what, colon, names = message.partition("required: ")
        # argparse also lists words of which none is fine, such as KEY=VALUE.
        needed = ", ".join(name for name in names.split(", ") if "=" not in name)
        raise UserError(f"{what}{colon}{needed} ({self.prog} --help lists what there is)")
