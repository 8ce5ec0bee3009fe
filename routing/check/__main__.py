"""Check an implementation of token routing: python -m routing.check module:function."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from routing.check.runner import check
from routing.check.subject import CheckError
from routing.errors import Parser, UserError, suggest


def parser() -> Parser:
    """Return the parser of the command's arguments."""
    result = Parser(
        prog="python -m routing.check",
        description="Run a model with marked tokens and report whether its routing is correct.",
        epilog="Exit code 0: nothing failed; 1: a property failed; 2: wrong input.",
    )
    result.add_argument(
        "function",
        metavar="module:function",
        help="a function that returns a routing.check.RoutedModel",
    )
    result.add_argument("--seed", type=int, default=0, help="its argument seed, if it has one")
    return result


def main(words: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    try:
        arguments = parser().parse_args(words)
        module_name, colon, function_name = arguments.function.partition(":")
        if not colon or not function_name:
            raise CheckError(f"{arguments.function}: expected module:function, as in mymodel:build")
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not module_name.startswith(error.name):
                raise
            raise CheckError(f"{module_name}: no such module here or installed") from None
        function = getattr(module, function_name, None)
        if not callable(function):
            names = [name for name in vars(module) if callable(getattr(module, name))]
            raise CheckError(
                f"{module_name} has no function {function_name}{suggest(function_name, names)}"
            )
        report = check(function, arguments.seed)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
