"""Errors as commands report them: one sentence and an exit code (no torch here)."""

from __future__ import annotations

import errno
import importlib.util
import re
import shutil
import sys
from pathlib import Path

from experiments.runtime.console import fit
from routing.errors import UserError

#: The repository, or the folder that the packages are installed in.
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("routing", "backbones", "experiments", "sweeps", "analysis")
# Other projects' packages that modules of options import.
_NEEDED_AT_IMPORT = ("annotated_types", "omegaconf", "pydantic", "yaml")

# 128 + signal number, as shells report a process that a signal ended.
EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143, "SIGUSR2": 140, "SIGUSR1": 138}


class Interrupted(Exception):
    """Training stopped on a signal (`reason`: SIGINT, SIGTERM or SIGUSR2) after saving `step`."""

    def __init__(self, reason: str, step: int, message: str = "") -> None:
        super().__init__(message or f"stopped by {reason} at step {step}")
        self.reason = reason
        self.step = step


# Characters of one word, such as a value, and of a whole error that are shown.
_LONGEST_WORD, _LONGEST_ERROR = 200, 1000


def _cut_middle(text: str, longest: int) -> str:
    """Leave out the middle of a long text: its end may say what was expected."""
    if len(text) <= longest:
        return text
    return f"{text[: longest - 60]}...{text[-57:]}"


def print_error(error: object) -> None:
    """Print an error as one line; on a terminal broken between words, so that paths stay whole.

    Values may come from anywhere: long ones are cut, and control characters are escaped.
    """
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(error))
    text = re.sub(
        rf"\S{{{_LONGEST_WORD},}}", lambda word: _cut_middle(word[0], _LONGEST_WORD), text
    )
    text = f"error: {_cut_middle(text, _LONGEST_ERROR)}"
    if sys.stderr.isatty():
        text = fit(text, shutil.get_terminal_size().columns)
    print(text, file=sys.stderr)


def sentence(error: Exception) -> str | None:
    """Return an error that users can fix as one sentence; None for what may be a bug."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        return _missing_package_sentence(error)
    if is_out_of_memory(error):
        return (
            "out of memory: use a smaller model or fewer samples at once (size=, "
            "train.micro_batch=, eval.batch=, --batch), or free some memory"
        )
    if isinstance(error, RuntimeError):
        for part, text in _RUNTIME_ERRORS.items():
            if part in str(error):
                return text
    if isinstance(error, OSError):
        return _file_error_sentence(error)
    return None


def require_packages() -> None:
    """End a script with one sentence where a package that its imports need is not installed.

    Scripts call it before those imports, which `run_command` could not catch.
    """
    for name in _NEEDED_AT_IMPORT:
        if importlib.util.find_spec(name) is None:
            missing = ModuleNotFoundError(f"No module named {name!r}", name=name)
            print_error(_missing_package_sentence(missing))
            raise SystemExit(2)


def _missing_package_sentence(error: ModuleNotFoundError) -> str | None:
    if error.name is None or error.name.partition(".")[0] in PACKAGES:
        return None
    return (
        f"{sys.executable} has no package {error.name!r}; type `make env` in {ROOT} and use "
        f".venv/bin/python there, or `{sys.executable} -m pip install {error.name}`"
    )


def _file_error_sentence(error: OSError) -> str | None:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        location = f" under {error.filename}" if error.filename else ""
        return (
            f"the disk is full{location}; free some space and run the same command again to resume"
        )
    if error.filename is None or error.errno is None:
        return None
    # An unusable folder is the user's to fix. A missing file may be a bug, except in these
    # folders, where nothing can be created and the system reports the parent as missing.
    special = str(error.filename).startswith(("/proc/", "/sys/", "/dev/"))
    if error.errno == errno.ENOENT and not special:
        return None
    return (
        f"{error.filename} cannot be used ({error.strerror}); give a folder that you can write "
        "to, such as paths.runs=FOLDER, --out FOLDER or the OUT of prepare"
    )


_COMPILER = (
    "torch.compile found no C++ compiler that works here: install one (such as g++, or name it in "
    "CXX), or type train.compile=none (for bench.py compile=none, and variants=torch,bf16)"
)
# Errors that libraries raise as a RuntimeError, by a part of their message.
_RUNTIME_ERRORS = {
    "No working C++ compiler": _COMPILER,
    "C++ compile error": _COMPILER,
    "Failed to find C compiler": _COMPILER,  # Triton's, for a GPU
    "torchvision::nms does not exist": "torch and torchvision come from different builds (a CPU "
    "torch beside a CUDA torchvision); "
    "reinstall both from one index: pip install --force-reinstall torch torchvision",
    "determine home directory": "a path begins with ~NAME and this machine has no user of that "
    "name; write the path in full, or ./~NAME for a file of that name here",
}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, as reported by Python, the system, torch's CPU or a GPU."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, ImportError):  # a library is loaded while memory is short
        return "failed to map segment" in str(error)
    phrases = (
        "out of memory", "can't allocate memory", "std::bad_alloc", "can't start new thread",
    )  # fmt: skip
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in phrases)
