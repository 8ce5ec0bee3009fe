"""Optional experiment trackers, through accelerate: TensorBoard, W&B, Trackio."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from routing.errors import UserError, require


def check_tracker(name: str) -> None:
    """Refuse a tracker whose package is not installed."""
    require(
        name == "none" or importlib.util.find_spec(name),
        f"log={name} needs a package that is not installed: pip install {name} (or log=none)",
    )


def open_tracker(
    name: str, folder: Path, run: str, config: Mapping[str, Any], accelerator: Any
) -> None:
    """Start the experiment tracker of a run."""
    if name == "none":
        return
    values = {}
    for key, value in config.items():
        values[key] = value if isinstance(value, (int, float, str, bool)) else str(value)
    options = {"wandb": {"name": run, "dir": str(folder)}, "trackio": {"name": run}}
    try:
        accelerator.init_trackers(
            "tread-suite", config=values, init_kwargs={name: options.get(name, {})}
        )
    except Exception as error:
        # Each service fails in its own way: no key, no network, another version.
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(
            f"log={name} did not start ({reason}); fix this, or type log=none: the run folder "
            "has the same numbers"
        ) from error
