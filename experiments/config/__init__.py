"""What a run is: schema, composition, identity and help of its configuration."""

from experiments.config.compose import flatten, load, options_of, readable, tidy
from experiments.config.schema import (
    CONF,
    GROUPS,
    ROLES,
    Config,
    PathsConfig,
    TrainConfig,
    role,
)
from experiments.runtime.keys import ConfigError

__all__ = [
    "CONF",
    "GROUPS",
    "ROLES",
    "Config",
    "ConfigError",
    "PathsConfig",
    "TrainConfig",
    "flatten",
    "load",
    "options_of",
    "readable",
    "role",
    "tidy",
]
