"""What the values of a run folder's files must be before anything is computed from them.

Somebody else wrote them: a wrong one lists its folder as damaged and leaves all others alone.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

_NUMBERS = (
    "step", "params", "macs_dense", "macs_routed", "macs_dense_no_attention",
    "macs_routed_no_attention", "wall_s", "images_per_s",
)  # fmt: skip
_WHOLE = ("seed", "step")
_TEXTS = ("name", "hash", "backbone", "size", "data", "scale", "route")
_NEEDED = ("backbone", "size", "data")


def is_number(value: object) -> bool:
    """Return whether a value is a finite number (a truth value is none)."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    # Not math.isfinite, which stops at a whole number of 400 digits.
    return abs(value) <= sys.float_info.max


def is_text(value: object) -> bool:
    """Return whether a value is text that every file and index takes: UTF-8, without NUL."""
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # half a surrogate pair, or a byte of a file name
        return False
    return True


def fault(row: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a run's flat row (summary and `config.*`), or None.

    Args:
        row: Columns as `analysis.load` names them.
    """
    for key, value in row.items():
        if not is_text(key) or (isinstance(value, str) and not is_text(value)):
            return f"{_shown(key)} is {_shown(value)}, which has a character that is no text"
    for key in _NUMBERS:
        if row.get(key) is not None and not is_number(row[key]):
            return f"summary.json: {key} is {_shown(row[key])}, not a number"
    for key in _WHOLE:
        if row.get(key) is not None and (not is_number(row[key]) or row[key] != int(row[key])):
            return f"summary.json: {key} is {_shown(row[key])}, not a whole number"
    if row.get("status") == "done" and row.get("step") is None:
        return "summary.json: it is done and has no step"
    for key in _TEXTS:
        value = row.get(key)
        if not isinstance(value, str) and (value is not None or key in _NEEDED):
            return f"summary.json: {key} is {_shown(value)}, not a name"
    if not isinstance(row.get("config.backbone.name"), str):
        return "config.yaml: backbone has no name"
    depth = row.get("config.backbone.depth")
    if depth is not None and not (is_number(depth) and depth >= 1):
        return f"config.yaml: backbone.depth is {_shown(depth)}, not a number of blocks"
    return None


def is_score(line: Mapping[str, Any]) -> bool:
    """Return whether a line of scores.jsonl holds a metric's name, a finite number and a step."""
    texts = (line.get("key"), line.get("features"), line.get("guidance"), line.get("sampler"))
    return (
        is_text(line.get("metric"))
        and is_number(line.get("value"))
        and (line.get("step") is None or is_number(line["step"]))
        and line.get("better") in ("lower", "higher", None)
        and all(text is None or is_text(text) for text in texts)
    )


def _shown(value: object) -> str:
    return repr(value)[:40]
