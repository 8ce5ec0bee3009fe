"""Step times that `experiments/bench.py` and the sweep `bench` have written below a runs folder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from routing.plain import json_of

_PLACES = ("bench*.json", ".sweeps/*/outputs/*.json")
_LARGEST = 10_000_000  # bytes; a benchmark's file has thousands


@dataclass(frozen=True)
class Timing:
    """One timed training step.

    Attributes:
        group: What rows of one benchmark share: model, tokens, batch, precision, machine.
        backbone: Family.
        route: Route with its rate; `none` for dense.
        macs: Multiply-adds of a forward pass for one image.
        images_per_s: From the median time of a step.
        speedup: Dense over routed time, None for a dense step.
        allowed: Dense over routed multiply-adds, None for a dense step.
    """

    group: str
    backbone: str
    route: str
    macs: float
    images_per_s: float
    speedup: float | None
    allowed: float | None


def timings(root: str | Path) -> tuple[list[Timing], list[str]]:
    """Return every timed step below a runs folder, and the files that cannot be read."""
    found: list[Timing] = []
    damaged: list[str] = []
    for path in sorted(path for place in _PLACES for path in Path(root).glob(place)):
        try:
            if path.stat().st_size > _LARGEST:
                raise ValueError("too large")
            found += _read(json_of(path.read_bytes()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            damaged.append(path.name)
    return found, damaged


def _read(record: dict[str, Any]) -> list[Timing]:
    options, machine = record["options"], record["environment"]
    rows = []
    # The other parts of a benchmark (a step's shares, single blocks) are no throughput.
    for row in record.get("steps", []):
        group = (
            f"{row['backbone']}-{row['size']}, {row['tokens']} tokens, batch {options['batch']}, "
            f"{options['precision']}, {machine['device_name']}, {machine['threads']} threads, "
            f"torch {machine['torch']}"
        )
        numbers = [_number(row[key]) for key in ("macs_per_image", "images_per_s")]
        ratios = [_number(row[key]) if key in row else None for key in ("speedup", "allowed")]
        rows.append(Timing(group, str(row["backbone"]), str(row["route"]), *numbers, *ratios))
    return rows


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{value} is no time, speed or count")
    return float(value)
