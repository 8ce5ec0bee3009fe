"""What every command shares: our packages first, one-sentence errors, exit codes (no torch)."""

from __future__ import annotations

import errno
import importlib.util
import io
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.runtime.process_group import process_group
from routing.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("routing", "backbones", "experiments", "sweeps", "analysis")


_OWN: dict[str, str] = {}  # what `choose_spinning` has set


def choose_spinning() -> None:
    """Say how long a waiting OpenMP thread spins; takes 50 ms, and acts before torch is imported.

    OpenMP's own choice is milliseconds: on a machine that does other work too, it holds the core
    that the other thread waits for (8x slower small steps). Sleeping at once costs a wake-up for
    every operation (steps take 1.4 to 1.7 times as long on two idle cores). Where nothing else
    runs, ten times the spins take another quarter of a step's time away; beside a busy process
    they would double it.
    """
    if "OMP_WAIT_POLICY" in os.environ:
        return
    if "GOMP_SPINCOUNT" not in os.environ:  # GNU's
        import psutil  # not at the top: a Python without it has to be told so

        # Less than half of one core is in use, and no other rank of ours is beside us.
        alone = os.environ.get("LOCAL_WORLD_SIZE", "1") == "1"
        idle = alone and sum(psutil.cpu_percent(0.05, percpu=True)) < 50
        _OWN["GOMP_SPINCOUNT"] = "10000" if idle else "1000"
    if "KMP_BLOCKTIME" not in os.environ:  # LLVM's and Intel's, which count milliseconds
        _OWN["KMP_BLOCKTIME"] = "0"
    os.environ.update(_OWN)


def environment_of_jobs() -> dict[str, str]:
    """Return the environment for runs that start later or elsewhere: without our own choices."""
    return {k: v for k, v in os.environ.items() if _OWN.get(k) != v}


class Interrupted(Exception):
    """Training stopped on a signal (`reason`: SIGINT, SIGTERM or SIGUSR2) after saving `step`."""

    def __init__(self, reason: str, step: int, message: str = "") -> None:
        super().__init__(message or f"stopped by {reason} at step {step}")
        self.reason = reason
        self.step = step


_NOT_DISKS = ("/proc/", "/sys/", "/dev/")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# 128 + signal number, as shells report a process that a signal ended.
EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143, "SIGUSR2": 140, "SIGUSR1": 138}


def check_packages() -> None:
    """Refuse to start where another distribution hides one of our packages (W&B ships a `sweeps`).

    Raises:
        UserError: Names the package and where the other one comes from.
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


def _plain(message: Warning | str, category: type[Warning], *where: Any, **line: Any) -> str:
    # Ours are sentences for the user; of others, where they come from is half of what they say.
    if category.__module__.split(".")[0] in PACKAGES:
        return f"warning: {message}\n"
    return _python_format(message, category, *where, **line)


def sentence(error: Exception) -> str | None:
    """Return what a user can mend, in a sentence; None for what may be our mistake."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        if error.name is None or error.name.partition(".")[0] in PACKAGES:
            return None
        return (
            f"{sys.executable} has no package {error.name!r}; type `make env` in {ROOT} and use "
            f".venv/bin/python there, or `{sys.executable} -m pip install {error.name}`"
        )
    if is_out_of_memory(error):
        return (
            "out of memory: take a smaller model or fewer samples at once (size=, "
            "train.micro_batch=, eval.batch=, --batch), or free some memory"
        )
    if isinstance(error, RuntimeError):
        return next((said for part, said in _KNOWN.items() if part in str(error)), None)
    if not isinstance(error, OSError):
        return None
    if error.errno in _FULL:
        where = f" under {error.filename}" if error.filename else ""
        return f"the disk is full{where}; free some space and type the same command to go on"
    # A folder that cannot be used is the user's to mend; a missing file may be our mistake, but for
    # what nothing can be made below: there the system says that the parent is missing.
    ours = error.errno in (None, errno.ENOENT) and not str(error.filename).startswith(_NOT_DISKS)
    if error.filename is None or ours:
        return None
    return (
        f"{error.filename} cannot be used ({error.strerror}); give a folder that you can write "
        "to, such as paths.runs=FOLDER, --out FOLDER or the OUT of prepare"
    )


_COMPILER = (
    "torch.compile found no C++ compiler that works here: install one (such as g++, or name it in "
    "CXX), or type train.compile=none (for bench.py compile=none, and variants=torch,bf16)"
)
# What others raise as a RuntimeError, by a part of its message.
_KNOWN = {
    "No working C++ compiler": _COMPILER,
    "C++ compile error": _COMPILER,
    "Failed to find C compiler": _COMPILER,  # Triton's, for a GPU
    "torchvision::nms does not exist": "torch and torchvision come from different builds (a CPU "
    "torch beside a CUDA torchvision); "
    "reinstall both from one index: pip install --force-reinstall torch torchvision",
    "determine home directory": "a path begins with ~NAME and this machine has no user of that "
    "name; write the path in full, or ./~NAME for what bears that name here",
}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, in the words of Python, the system, torch's CPU or a GPU."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, ImportError):  # of a library that is loaded when memory is short
        return "failed to map segment" in str(error)
    parts = ("out of memory", "can't allocate memory", "std::bad_alloc", "can't start new thread")
    return isinstance(error, RuntimeError) and any(part in str(error) for part in parts)


def home_path(name: str) -> Path:
    """Return a path whose ~, quoted or behind `=`, is the home all the same."""
    return Path(name).expanduser()


def _prepare_output() -> None:
    """Print what the output's encoding lacks as escapes (LANG=C), and nothing to a closed output.

    Neither may end a run.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell (>&-), or a Windows service
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def print_error(error: object) -> None:
    """Print the one line that a command ends with."""
    print(f"error: {error}", file=sys.stderr)


def run_command(
    command: Callable[[list[str]], int | None],
    argv: Sequence[str] | None = None,
    *,
    computes: bool = False,
) -> int:
    """Run a command and turn what went wrong into one line and an exit code.

    Args:
        command: Takes the arguments; returns an exit code or None for 0.
        argv: Arguments without the program name (default: the process's own).
        computes: The command will import torch and compute with it.

    Returns:
        0, the command's code, 2 for wrong input, 128 + signal after a requested stop.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    warnings.formatwarning = _plain
    _prepare_output()
    try:
        check_packages()
        if not {"-h", "--help", "help"} & set(arguments):
            process_group()  # refuses one that is left over or set by half
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
        # The reader of our output (head, less) has left; there is nobody to tell.
        sys.stderr.close()
        return 0
    except Exception as error:
        text = sentence(error)
        if text is None:
            raise
        print_error(text)
        return 2
