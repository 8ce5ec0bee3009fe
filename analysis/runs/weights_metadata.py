"""The metadata of a run's `model.safetensors`, without torch and without its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from routing.plain import json_of

_LARGEST_HEADER = 100 * 2**20


def metadata(path: str | Path) -> dict[str, Any] | None:
    """Return the metadata of a safetensors file, JSON texts decoded.

    None if there is none to read.
    """
    try:
        with Path(path).open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if not 2 <= size <= _LARGEST_HEADER:
                return None
            header = json_of(stream.read(size))
        texts = header["__metadata__"]
        return {key: _decoded(value) for key, value in texts.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _decoded(text: str) -> Any:
    try:
        return json_of(text)
    except ValueError:
        return text
