"""What an error says about a key that a configuration does not have (no torch here)."""

from __future__ import annotations

from collections.abc import Collection

from experiments.config import groups
from experiments.config.groups import GROUPS
from experiments.data.data_options import OWN_PICTURES
from experiments.options.roles import ConfigError
from routing.errors import suggest


def unknown_key(setting: str, valid_keys: Collection[str]) -> ConfigError:
    """Return the error for an override whose key is not among `valid_keys`."""
    key, value = setting.split("=", 1)
    group, _, option = key.partition(".")
    if groups.choosing_key(key) != key:
        return ConfigError(f"{setting}: expected {group}={value or 'NAME'}")
    below = [name for name in sorted(valid_keys) if name.startswith(f"{key}.")]
    example = "".join(f", such as {name}=" for name in below[:1])
    if below:
        return ConfigError(f"{key} is a group of keys: expected {key}.KEY=VALUE{example}")
    if group in GROUPS and group not in groups.PRESETS:
        entries = []
        for name in groups.names(group):
            if option in groups.defaults(group, name):
                entries.append(f"{group}={name}")
        verb = "has" if len(entries) == 1 else "have"
        if entries:
            hint = f"; {OWN_PICTURES}" if key == "data.path" else ""
            owners = " and ".join(filter(None, [", ".join(entries[:-1]), entries[-1]]))
            return ConfigError(f"unknown key {key}: only {owners} {verb} it{hint}")
    closest = suggest(key, [*GROUPS, *sorted(valid_keys)])
    return ConfigError(
        f"unknown key {key}{closest} (python experiments/run.py --help all lists all keys)"
    )
