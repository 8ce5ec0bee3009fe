"""What a run is: schema, composition, identity and help of its configuration."""

from experiments.config.schema import (
    CONF,
    GROUPS,
    Config,
    ConfigError,
    PathsConfig,
    TrainConfig,
    data_fingerprint,
    flatten,
    load,
    options_of,
    tidy,
)

__all__ = [
    "CONF",
    "Config",
    "ConfigError",
    "GROUPS",
    "PathsConfig",
    "TrainConfig",
    "data_fingerprint",
    "flatten",
    "load",
    "options_of",
    "tidy",
]
