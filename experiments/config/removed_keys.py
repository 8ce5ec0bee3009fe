"""Configuration keys that were removed, and the only value that is still accepted for each.

Configurations of older runs and weights files contain these keys, and the names of those runs
depend on them: a removed key is ignored at its former default and refused otherwise, and hashing
inserts the former default, so that every older run keeps its name (no torch here).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from backbones.validation import show
from experiments.options.roles import ConfigError
from routing.errors import require

# Frozen: the hash of every run contains these values. `group.key` and its former default.
REMOVED: dict[str, Any] = {"sampler.reuse": None, "sampler.reuse_every": 2}


def former_defaults(group: str) -> dict[str, Any]:
    """Return the removed keys of a group with their former defaults."""
    keys = [key for key in REMOVED if key.startswith(f"{group}.")]
    return {key.removeprefix(f"{group}."): REMOVED[key] for key in keys}


def check_removed(key: str, value: Any) -> None:
    """Refuse a removed key that does not have its former default; `value` as read or as typed."""
    default = show(REMOVED[key])
    require(
        show(value) == default,
        f"{key}={show(value)}: {key} was removed; only its former default {key}={default} is "
        "accepted",
        ConfigError,
    )


def without_removed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the removed keys in its groups."""
    remaining = dict(values)
    for key in REMOVED:
        group, name = key.split(".")
        options = remaining.get(group)
        if isinstance(options, Mapping) and name in options:
            check_removed(key, options[name])
            remaining[group] = {k: value for k, value in options.items() if k != name}
    return remaining


def without_removed_words(overrides: Sequence[str]) -> list[str]:
    """Return overrides, each `key=value`, without those of removed keys."""
    remaining = []
    for text in overrides:
        key, _, value = text.partition("=")
        if key in REMOVED:
            check_removed(key, value)
        else:
            remaining.append(text)
    return remaining


def insert_removed(values: dict[str, Any]) -> None:
    """Insert the former defaults into the groups of a configuration that is to be hashed."""
    for group in {key.split(".")[0] for key in REMOVED}:
        values[group] |= former_defaults(group)
