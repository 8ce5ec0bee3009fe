"""Check an implementation of token routing: python -m routing.check module:function."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch.distributed

from routing.check import check
from routing.check.report import CheckError, RoutedModel
from routing.errors import UserError, suggest


class CommandParser(argparse.ArgumentParser):
    """An argument parser that reports wrong arguments in one sentence."""

    def error(self, message: str) -> NoReturn:
        """Raise `CheckError` instead of printing the usage and exiting."""
        raise CheckError(f"{message} (see {self.prog} --help)")


def parser() -> CommandParser:
    """Return the parser of the command's arguments."""
    result = CommandParser(
        prog="python -m routing.check",
        description="Run a model with marked tokens and report whether its routing is correct.",
        epilog="Exit code 0: nothing failed; 1: a property failed; 2: wrong input.",
    )
    result.add_argument(
        "function",
        metavar="module:function",
        help="a function that returns a routing.check.RoutedModel, in a module or a file.py",
    )
    result.add_argument("--seed", type=int, default=0, help="its argument seed, if it has one")
    return result


def main(words: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    try:
        arguments = parser().parse_args(words)
        module_name, _, function_name = arguments.function.partition(":")
        if not module_name or not function_name:
            raise CheckError(f"{arguments.function}: expected module:function or file.py:function")
        function = _function(module_name, function_name)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # torchrun
            torch.distributed.init_process_group("gloo")
        report = check(function, arguments.seed)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Exception:  # of the model or its description: exit code 1 is a finding
        traceback.print_exc()
        return 2
    if os.environ.get("RANK", "0") == "0":
        print(report)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0 if report.ok else 1


def _function(module_name: str, function_name: str) -> Callable[..., RoutedModel]:
    """Import a function of a module, or of a file by its path."""
    if module_name.endswith(".py"):
        path = Path(module_name)
        if not path.is_file():
            raise CheckError(f"{module_name}: no such file")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not module_name.startswith(error.name):
                raise
            raise CheckError(f"{module_name}: no such module here or installed") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise CheckError(
            f"{module_name} has no function {function_name}{suggest(function_name, names)}"
        )
    return function


if __name__ == "__main__":
    sys.exit(main())
