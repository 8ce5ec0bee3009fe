"""What a run folder says about its run, read without loading anything but small JSON files."""

import re
from pathlib import Path
from typing import Any

from routing.parsing import bytes_of, json_of

_STEP = re.compile(r"step-(\d+)\Z")


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
    if summary.get("status") != "done":
        return False
    step = summary.get("step")
    return steps is None or (isinstance(step, int) and step >= steps)


def saved_step(folder: str | Path) -> int:
    """Return the step of the newest checkpoint, 0 if there is none."""
    try:
        names = [entry.name for entry in (Path(folder) / "checkpoints").iterdir()]
    except OSError:
        return 0
    return max((int(m.group(1)) for name in names if (m := _STEP.match(name))), default=0)


def speed(folder: str | Path) -> float | None:
    """Return the images per second that a run measured, from its summary or its heartbeat."""
    for name in ("summary.json", "status.json"):
        value = read(Path(folder) / name).get("images_per_s")
        if isinstance(value, int | float) and value > 0:
            return float(value)
    return None
