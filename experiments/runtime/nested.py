"""Nested mappings of plain values: flattened to dotted keys, and compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by dotted key; an empty mapping is a value."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return both values of each dotted key in which nested mappings differ, None for none."""
    first, second = flatten(one), flatten(other)
    pairs = {}
    for key in sorted(first.keys() | second.keys()):
        if first.get(key) != second.get(key):
            pairs[key] = (first.get(key), second.get(key))
    return pairs
