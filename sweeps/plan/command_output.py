"""Where the commands of a grid write: a grid may be somebody else's, and its arguments are free."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from routing.errors import require
from sweeps import SweepError

# Commands of `python -m analysis` that write to no other place than `--out` or a run folder.
_ANALYSIS = ("report", "tables", "figures", "similarity", "guidance-scale", "compare", "list")


def check_writes(entry: str, arguments: Sequence[str], output: str, folders: Sequence[str]) -> None:
    """Refuse arguments with which a command of this suite would write anywhere.

    Its own parser reads them, as its job will. What it writes has to begin with `output`, which is
    `{out}`, or lies in the run that it reads, which has to lie in one of `folders`.

    Raises:
        UserError: A path is elsewhere, or the command does not take these arguments.
    """
    require(not {"-h", "--help", "help"} & set(arguments), "--help: expected arguments", SweepError)
    if entry == "experiments.bench:main":
        values = dict(argument.partition("=")[::2] for argument in arguments)
        _check_output("out=", values.get("out"), output)
    elif entry == "experiments.evaluate:main":
        options = _parser(entry).parse_intermixed_args(list(arguments))
        _check_source(options.source, folders)
        for key in ("out", "cache", "write_samples", "write_reference"):
            if getattr(options, key) is not None:
                _check_output(f"--{key.replace('_', '-')}", getattr(options, key), output)
    elif entry == "analysis.command:main":
        options = _parser(entry).parse_args(list(arguments))
        require(
            options.command in _ANALYSIS,
            f"analysis {options.command}: expected one of {', '.join(_ANALYSIS)} in a grid",
            SweepError,
        )
        sources = getattr(options, "runs", None) or []
        for source in sources if isinstance(sources, list) else [sources]:
            _check_source(source, folders)
        prints = vars(options).get("print")
        writes = options.command in ("report", "tables", "figures") and not prints
        if writes or vars(options).get("out") is not None:
            _check_output("--out", options.out, output)


def _parser(entry: str) -> argparse.ArgumentParser:
    # By name, since analysis is above this package.
    parser: argparse.ArgumentParser = importlib.import_module(entry.partition(":")[0]).parser()
    return parser


def _check_output(key: str, path: Any, output: str) -> None:
    text = str(path or "")
    is_below = text.startswith(output) and ".." not in Path(text).parts
    require(is_below, f"{key} {text}: expected a path that begins with {{out}}", SweepError)


def _check_source(source: Any, folders: Sequence[str]) -> None:
    path = Path(str(source))
    is_inside = ".." not in path.parts and any(path.is_relative_to(folder) for folder in folders)
    require(is_inside, f"{source}: expected {{parent}} or {{runs}}", SweepError)
