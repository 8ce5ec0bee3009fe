"""The argument parser of every command: its errors are one sentence (no torch here)."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from routing.errors import UserError, suggest


class Parser(argparse.ArgumentParser):
    """An argument parser that reports wrong arguments as a `UserError` of one sentence."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Refuse `--option=--`, of which argparse makes an empty list instead of a value."""
        arguments = list(sys.argv[1:] if args is None else args)
        for argument in arguments:
            if argument.startswith("-") and argument.endswith("=--"):
                self.error(f"argument {argument[:-3]}: expected a value, not --")
        return super().parse_known_args(arguments, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise `UserError` instead of printing the usage and exiting."""
        for argument in message.partition("unrecognized arguments: ")[2].split():
            if argument.startswith("-"):
                flag = argument.partition("=")[0]
                message += suggest(flag, self._option_string_actions)
                break
        if choice := re.search(r"invalid choice: '?(.*?)'? \(choose from (.*)\)", message):
            message += suggest(choice[1], choice[2].replace("'", "").split(", "))
        problem, colon, names = message.partition("required: ")
        # argparse also lists arguments that may be left out, such as KEY=VALUE.
        missing = ", ".join(name for name in names.split(", ") if "=" not in name)
        raise UserError(f"{problem}{colon}{missing} (see {self.prog} --help)")
