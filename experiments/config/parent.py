"""`init=RUN[@STEP]`: start a new run from another one's EMA weights (no torch here)."""

from __future__ import annotations

import glob
from pathlib import Path

from experiments.runtime.files import sha256
from routing.errors import UserError, suggest


class InitError(UserError):
    """`init=` names nothing that weights can be taken from."""


def split(text: str) -> tuple[Path, int | None]:
    """Return the folder or file and the step that `RUN[@STEP]` names.

    Raises:
        InitError: The step is no number, or the path does not exist or is a pattern of several.
    """
    if text == "required":
        raise InitError("this recipe goes on from another run's weights: say which with init=RUN")
    # A run has an @ of its own in its name (2-8@0.75); a step is what follows the last one.
    head, at, tail = text.rpartition("@")
    if at and not tail.isdigit() and Path(text).expanduser().exists():
        at = ""
    path, step = (head, tail) if at else (text, "")
    if at and not step.isdigit():
        raise InitError(
            f"init={text}: expected RUN or RUN@STEP with a whole number, got step {step!r}"
        )
    found = Path(path).expanduser()
    if not found.exists() and glob.has_magic(path):
        # A shell leaves init=runs/dit-* as it is, and run folders end in a hash.
        fits = sorted(glob.glob(str(found)))
        if len(fits) != 1:
            those = f"fits {len(fits)} paths, such as {fits[0]}" if fits else "fits nothing"
            raise InitError(f"init={text}: the pattern {those}; expected exactly one run")
        found = Path(fits[0])
    if not found.exists():
        siblings = [p.name for p in found.parent.iterdir()] if found.parent.is_dir() else []
        raise InitError(f"init={text}: {found} does not exist{suggest(found.name, siblings)}")
    return found, int(step) if at else None


def parent_digest(text: str) -> str:
    """Return the SHA-256 of the weights that `init=` names: part of the child's identity.

    Raises:
        InitError: There are no such weights.
    """
    path, step = split(text)
    if path.is_dir():
        path = path / (
            f"checkpoints/step-{step:08d}/state.safetensors"
            if step is not None
            else "model.safetensors"
        )
    if not path.is_file():
        raise InitError(
            f"init={text}: no weights at {path}; finish that run, or name a step it kept"
        )
    return sha256(path)
