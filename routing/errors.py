"""Errors that a user can cause and mend: one sentence each, never a traceback (no torch here)."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import NoReturn


class UserError(ValueError):
    """Wrong input from a user: the message says what is wrong, what was expected and what to type.

    Commands print the message on one line and exit with code 2; libraries raise it as a
    `ValueError`.
    """


def suggest(word: str, options: Iterable[str]) -> str:
    """Return `"; did you mean X?"` for the option closest to `word`, or an empty string."""
    close = difflib.get_close_matches(str(word), [str(o) for o in options], n=1, cutoff=0.55)
    return f"; did you mean {close[0]}?" if close else ""


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

    def error(self, message: str) -> NoReturn:
        """Raise `UserError` instead of printing the usage and exiting."""
        unknown = message.partition("unrecognized arguments: ")[2].split()
        if flags := [word.partition("=")[0] for word in unknown if word.startswith("-")]:
            message += suggest(flags[0], self._option_string_actions)
        what, colon, names = message.partition("required: ")
        # argparse also lists words of which none is fine, such as KEY=VALUE.
        needed = ", ".join(name for name in names.split(", ") if "=" not in name)
        raise UserError(f"{what}{colon}{needed} ({self.prog} --help lists what there is)")
