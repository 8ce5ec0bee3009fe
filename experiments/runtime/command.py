"""Entry point of every command: package checks, one-sentence errors, exit codes (no torch)."""

from __future__ import annotations

import importlib.util
import io
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.runtime.console import printable
from experiments.runtime.errors import (
    EXIT_CODES,
    PACKAGES,
    ROOT,
    Interrupted,
    print_error,
    sentence,
)
from experiments.runtime.process_group import process_group
from routing.errors import UserError

HELP_WORDS = frozenset(("-h", "--help", "help"))
_SPIN_VARIABLES: dict[str, str] = {}  # environment variables that `choose_spinning` has set


def choose_spinning() -> None:
    """Set how long waiting OpenMP threads spin (takes 50 ms; call it before torch is imported).

    OpenMP's default is milliseconds: on a machine that does other work too, a spinning thread
    occupies the core that the other thread waits for (8x slower small steps). Sleeping at once
    costs a wake-up per operation (steps take 1.4 to 1.7 times as long on two idle cores). On an
    idle machine, ten times the spins save another quarter of a step's time; beside a busy process
    they would double it.
    """
    if "OMP_WAIT_POLICY" in os.environ:
        return
    if "GOMP_SPINCOUNT" not in os.environ:  # GNU's
        import psutil  # not at the top: without it, `run_command` prints what to install

        # Less than half of one core is in use, and no other rank of ours runs here.
        alone = os.environ.get("LOCAL_WORLD_SIZE", "1") == "1"
        idle = alone and sum(psutil.cpu_percent(0.05, percpu=True)) < 50
        _SPIN_VARIABLES["GOMP_SPINCOUNT"] = "10000" if idle else "1000"
    if "KMP_BLOCKTIME" not in os.environ:  # LLVM's and Intel's, in milliseconds
        _SPIN_VARIABLES["KMP_BLOCKTIME"] = "0"
    os.environ.update(_SPIN_VARIABLES)


def environment_of_jobs() -> dict[str, str]:
    """Return the environment for runs that start later or elsewhere, without our spin settings."""
    environment = dict(os.environ)
    for name, value in _SPIN_VARIABLES.items():
        if environment.get(name) == value:
            del environment[name]
    return environment


def check_packages() -> None:
    """Refuse to start if another distribution hides one of our packages (W&B ships a `sweeps`).

    Raises:
        UserError: Names the package and the location of the other one.
    """
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        origin = Path(spec.origin).resolve() if spec and spec.origin else None
        if origin is None or ROOT not in origin.parents:
            raise UserError(
                f"the package {name!r} that Python finds is another project's ({origin}), not "
                "this one's: "
                f"run from the repository root ({ROOT}) or use a fresh environment (make demo)"
            )


_python_format = warnings.formatwarning


def _format_warning(
    message: Warning | str, category: type[Warning], *location: Any, **line: Any
) -> str:
    # Our warnings are sentences for users; for those of libraries the location matters.
    if category.__module__.split(".")[0] in PACKAGES:
        return f"warning: {printable(message)}\n"
    return _python_format(message, category, *location, **line)


def home_path(name: str) -> Path:
    """Return a path with ~ expanded, which shells leave alone in quotes and after `=`."""
    return Path(name).expanduser()


def _prepare_output() -> None:
    """Escape characters that the output's encoding lacks (LANG=C); ignore a closed output.

    Neither may end a run.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell (>&-), or a Windows service
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def run_command(
    command: Callable[[list[str]], int | None],
    argv: Sequence[str] | None = None,
    *,
    computes: bool = False,
) -> int:
    """Run a command, and turn errors into one line and an exit code.

    Args:
        command: Takes the arguments; returns an exit code or None for 0.
        argv: Arguments without the program name (default: the process's own).
        computes: Whether the command imports torch and computes with it.

    Returns:
        0, the command's code, 2 for invalid input, 128 + signal after a requested stop.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    warnings.formatwarning = _format_warning
    _prepare_output()
    try:
        check_packages()
        if HELP_WORDS.isdisjoint(arguments):
            process_group()  # refuses inconsistent environment variables
            if computes:
                choose_spinning()
        return command(arguments) or 0
    except Interrupted as error:
        print(str(error), file=sys.stderr)
        return EXIT_CODES.get(error.reason, 1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output (head, less) has exited.
        sys.stderr.close()
        return 0
    except Exception as error:
        text = sentence(error)
        if text is None:
            raise
        print_error(text)
        return 2
