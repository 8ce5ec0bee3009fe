"""What a run folder says of its run: read without torch, from names and small JSON files."""

from pathlib import Path
from typing import Any

from experiments.runtime.parsing import bytes_of, json_of


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
    """Return step and folder of every checkpoint of a run, in order."""
    found = []
    for path in (folder / "checkpoints").glob("step-*"):
        digits = path.name.removeprefix("step-")
        if digits.isdecimal() and path.is_dir():
            found.append((int(digits), path))
    return sorted(found)


def saved_step(folder: str | Path) -> int:
    """Return the step of the newest checkpoint, 0 if there is none."""
    return max((step for step, _ in listed(Path(folder))), default=0)


def speed(folder: str | Path) -> float | None:
    """Return the images per second that a run measured, from its summary or its heartbeat."""
    for name in ("summary.json", "status.json"):
        value = read(Path(folder) / name).get("images_per_s")
        if isinstance(value, int | float) and value > 0:
            return float(value)
    return None
