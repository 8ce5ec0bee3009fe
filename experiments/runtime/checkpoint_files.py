"""Checkpoint folders: written whole or not at all, verified by checksum, never unpickled.

A checkpoint is a folder `step-00001000` with `state.safetensors` (weights, EMA, optimizer),
`state.json` (step, counters, generators, config) and `manifest.json` (sizes and SHA-256 of both).
It is written under a temporary name, flushed and renamed.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from backbones.parsing import bytes_of, json_of
from backbones.weights import save_tensors
from experiments.runtime.files import fsync_dir, sha256
from experiments.runtime.run_folder import listed, step_folder
from routing.errors import UserError

FORMAT = "tread-suite/1"


class CheckpointError(UserError):
    """A checkpoint or weights file that cannot be written, read or used."""


# --- writing -------------------------------------------------------------------------------------


def write(
    folder: Path,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    *,
    keep: int = 2,
    keep_every: int = 0,
    streak: int = 0,
) -> Path:
    """Write the checkpoint of `step` and delete those that are no longer needed.

    Args:
        folder: The run folder.
        step: Optimizer steps done.
        tensors: Weights, averages and optimizer state by name.
        state: The rest, JSON-able.
        keep: How many of the newest checkpoints are kept.
        keep_every: Checkpoints of multiples of so many steps are kept too; 0 for none.
        streak: The last so many steps were non-finite: the newest checkpoint before them is kept,
            because a roll-back returns to it.

    Raises:
        CheckpointError: The disk is full or refuses; earlier checkpoints are untouched.
    """
    target = step_folder(folder, step)
    spare = target.with_name(f"{target.name}.old")
    temporary = target.with_name(f".{target.name}.tmp{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        # Not the run folder itself: one that was deleted must not come back without its config.
        target.parent.mkdir(exist_ok=True)
        temporary.mkdir()
        _write_files(temporary, tensors, state)
        if target.exists():  # perhaps the only checkpoint: it stays until the new one is complete
            os.replace(target, spare)
        os.replace(temporary, target)
        fsync_dir(target.parent)
        shutil.rmtree(spare, ignore_errors=True)
    except IO_ERRORS as error:
        shutil.rmtree(temporary, ignore_errors=True)
        earlier = listed(folder)
        intact = "no checkpoint was written yet"
        if earlier:
            intact = f"the checkpoint of step {earlier[-1][0]} is intact"
        raise CheckpointError(
            f"could not write the checkpoint of step {step} to {target.parent} "
            f"({reason(error)}); {intact}: free some space and run the same command again to resume"
        ) from error
    _delete_old(folder, step - streak, keep, keep_every)
    return target


def _delete_old(folder: Path, last_good_step: int, keep: int, keep_every: int) -> None:
    checkpoints = listed(folder)
    rollback_step = max((step for step, _ in checkpoints if step <= last_good_step), default=None)
    for step, path in checkpoints[:-keep]:
        is_milestone = keep_every and step % keep_every == 0
        if step != rollback_step and not is_milestone:
            shutil.rmtree(path, ignore_errors=True)


def _write_files(
    folder: Path, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]
) -> None:
    save_tensors(folder / "state.safetensors", tensors)
    (folder / "state.json").write_text(json.dumps(state))
    manifest = {"format": FORMAT, "files": describe_files(folder)}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for path in folder.iterdir():
        with path.open("r+b") as handle:
            os.fsync(handle.fileno())


_CONTENTS = ("state.safetensors", "state.json")


def describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return size and checksum of the files of a checkpoint, as its manifest lists them."""
    descriptions = {}
    for name in _CONTENTS:
        path = folder / name
        if path.exists() and not path.is_file():  # reading a pipe would block for ever
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        descriptions[name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    return descriptions


# safetensors wraps the system's error in its own type.
IO_ERRORS = (OSError, SafetensorError)
# Raised when values of an unexpected form are read.
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError)


def reason(error: Exception) -> str:
    """Return the text of an error in one line."""
    return " ".join(str(getattr(error, "strerror", None) or error).split())


# --- reading -------------------------------------------------------------------------------------


def verify(path: Path) -> str | None:
    """Return how a checkpoint differs from its manifest, or None if it does not.

    Raises:
        CheckpointError: A file is there but cannot be read (permissions, a network file system
            that fails for a moment), which says nothing about its contents.
    """
    try:
        missing = sorted({"manifest.json", *_CONTENTS} - set(os.listdir(path)))
        if missing:
            return f"{' and '.join(missing)}: missing"
        manifest = bytes_of(path / "manifest.json")
        actual = describe_files(path)
    except OSError as error:
        raise unreadable(path, error) from error
    differing = []
    try:
        expected = json_of(manifest)["files"]
        for name, description in actual.items():
            if expected[name] != description:
                differing.append(name)
    except MALFORMED:
        return "manifest.json: not a manifest"
    if differing:
        return f"{' and '.join(differing)}: size or checksum differs from manifest.json"
    return None


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """Return the error for a file that cannot be read; its contents may be intact."""
    return CheckpointError(
        f"{error.filename or path} cannot be read or moved ({reason(error)}); it may be intact, so "
        "nothing was changed: restore access or repair the file system, then run the command again"
    )


def newest(
    folder: Path, say: Callable[[str], object] = print, up_to: int | None = None
) -> Path | None:
    """Return the newest checkpoint that verifies, of no later step than `up_to`.

    Damaged ones are set aside, each with a message to `say`.

    Raises:
        CheckpointError: A checkpoint cannot be read or set aside; the files stay as they are.
    """
    try:
        _clean_up(folder / "checkpoints")
        for step, path in reversed(listed(folder)):
            if up_to is not None and step > up_to:
                continue
            problem = verify(path)
            if problem is None:
                return path
            aside = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(path, aside)
            say(
                f"checkpoint {path.name} is damaged ({problem}); set aside as {aside.name}, trying "
                "the one before it"
            )
    except OSError as error:
        raise unreadable(folder / "checkpoints", error) from error
    return None


def _clean_up(checkpoints: Path) -> None:
    """Clean up after a process that was killed while it wrote a checkpoint."""
    for unfinished in checkpoints.glob(".step-*"):
        shutil.rmtree(unfinished, ignore_errors=True)
    for spare in checkpoints.glob("step-*.old"):  # of a checkpoint that was being replaced
        if spare.with_suffix("").exists():
            shutil.rmtree(spare, ignore_errors=True)
        else:
            os.replace(spare, spare.with_suffix(""))


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors and the state of a checkpoint folder."""
    try:
        state = json_of((path / "state.json").read_bytes())
        # Raises the system's error, where safetensors reports a missing file.
        with (path / "state.safetensors").open("rb"):
            return load_file(path / "state.safetensors"), state
    except OSError as error:
        raise unreadable(path, error) from error
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path} is not a readable checkpoint ({reason(error)})") from error
