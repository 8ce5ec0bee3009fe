"""State of a run, read from the names and small JSON files of its folder (no torch here)."""

import os
import socket
from pathlib import Path
from typing import Any

from backbones.parsing import bytes_of, json_of
from experiments.runtime.files import refuse_links
from routing.errors import UserError


class RunFolderError(UserError):
    """The folder of a run was deleted, renamed or replaced while the run was training."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            f"{folder} was deleted, renamed or replaced while this run was training, so the run "
            "has stopped without writing there: move the folder back and type the same command to "
            "resume, or type it to train from the start"
        )


# What the suite writes in a run folder: files, and folders that belong to it whole.
_FILES = (
    "config.yaml", "env.json", "precision.json", "summary.json", "status.json", "metrics.jsonl",
    "scores.jsonl", "lock", "model.safetensors", "loss.png", "progress.gif", "similarity.npz",
    "similarity.png", "guidance_scale.json", "tread-suite", "wandb",
)  # fmt: skip
_FOLDERS = ("checkpoints", "samples", "evaluations")


def open_folder(folder: Path) -> Path:
    """Return a run folder, which may be somebody else's, or refuse a link among the suite's names.

    Raises:
        UserError: The message names the link.
    """
    refuse_links(folder, _FILES, _FOLDERS)
    return folder


def read(path: str | Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one for an absent or damaged file."""
    try:
        values = json_of(bytes_of(Path(path)))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def finished(folder: str | Path, steps: int | None = None) -> bool:
    """Whether the run in `folder` is done, with at least `steps` steps."""
    summary = read(Path(folder) / "summary.json")
    step = summary.get("step")
    enough = steps is None or (isinstance(step, int) and step >= steps)
    return summary.get("status") == "done" and enough


def diverged(folder: str | Path) -> bool:
    """Whether the loss of the finished run in `folder` had grown, or was not finite, in the end."""
    summary = read(Path(folder) / "summary.json")
    return summary.get("diverged") is True or ("loss" in summary and summary["loss"] is None)


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint of `step`."""
    return folder / "checkpoints" / f"step-{step:08d}"


def is_lost(folder: Path) -> bool:
    """Whether a run folder that this process has locked is gone, or now belongs to another process.

    This compares the lock file's text, because inode numbers change on some network file systems.
    """
    holder = read(folder / "lock")  # empty on a full disk
    is_ours = holder.get("pid") == os.getpid() and holder.get("host") == socket.gethostname()
    return not folder.is_dir() or (bool(holder) and not is_ours)


def check_present(folder: Path) -> None:
    """Refuse to write to a run folder that is lost, or whose `config.yaml` is gone.

    Raises:
        RunFolderError: The folder was moved, deleted or replaced.
    """
    if is_lost(folder) or not (folder / "config.yaml").is_file():
        raise RunFolderError(folder)


def listed(folder: Path) -> list[tuple[int, Path]]:
    """Return step and folder of all checkpoints of a run, in order.

    Raises:
        OSError: The folder exists but cannot be read, which must not look like a new run.
    """
    checkpoints = []
    try:
        # Not Path.glob, which returns nothing for an unreadable folder.
        entries = list(os.scandir(folder / "checkpoints"))
    except FileNotFoundError:
        return []
    for entry in entries:
        digits = entry.name.removeprefix("step-")
        if entry.name.startswith("step-") and digits.isdecimal() and entry.is_dir():
            checkpoints.append((int(digits), Path(entry.path)))
    return sorted(checkpoints)


def saved_step(folder: str | Path) -> int:
    """Return the step of the newest checkpoint; 0 without one, or for an unreadable folder.

    For reports, in which one unreadable run must not hide the status of the others.
    """
    try:
        return max((step for step, _ in listed(Path(folder))), default=0)
    except OSError:
        return 0
