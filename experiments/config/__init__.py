"""What a run is: schema, composition, identity and help of its configuration."""

from experiments.config.compose import load, options_of
from experiments.config.schema import CONF, GROUPS, ROLES, Config, PathsConfig, TrainConfig, role
from experiments.options.fields import ConfigError, flatten

__all__ = [
    "CONF", "GROUPS", "ROLES", "Config", "ConfigError", "PathsConfig", "TrainConfig", "flatten",
    "load", "options_of", "role",
]  # fmt: skip
