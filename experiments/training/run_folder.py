"""What a run folder says of its run: read without torch, from names and small JSON files."""

import os
from pathlib import Path
from typing import Any

from routing.parsing import bytes_of, json_of


def read(path: str | Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if it is absent, half written or none."""
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


def step_folder(folder: Path, step: int) -> Path:
    """Return where the checkpoint of `step` stands below a run folder."""
    return folder / "checkpoints" / f"step-{step:08d}"


def listed(folder: Path) -> list[tuple[int, Path]]:
    """Return step and folder of every checkpoint of a run, in order.

    Raises:
        OSError: The folder is there but cannot be read: that must not look like a new run.
    """
    checkpoints = []
    try:
        # Not Path.glob, which finds nothing in a folder that it may not read.
        entries = list(os.scandir(folder / "checkpoints"))
    except (FileNotFoundError, NotADirectoryError):
        return []
    for entry in entries:
        digits = entry.name.removeprefix("step-")
        if entry.name.startswith("step-") and digits.isdecimal() and entry.is_dir():
            checkpoints.append((int(digits), Path(entry.path)))
    return sorted(checkpoints)


def saved_step(folder: str | Path) -> int:
    """Return the step of the newest checkpoint; 0 if there is none, or none that can be seen.

    This is for reports: one unreadable run must not hide the status of the others.
    """
    try:
        return max((step for step, _ in listed(Path(folder))), default=0)
    except OSError:
        return 0


def speed(folder: str | Path) -> float | None:
    """Return the images per second that a run measured, from its summary or its heartbeat."""
    for name in ("summary.json", "status.json"):
        value = read(Path(folder) / name).get("images_per_s")
        if isinstance(value, int | float) and value > 0:
            return float(value)
    return None
