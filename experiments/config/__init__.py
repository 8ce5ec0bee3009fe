"""What a run is: schema, composition, identity and help of its configuration."""

from experiments.config.compose import load
from experiments.config.groups import CONF, GROUPS, names
from experiments.config.schema import Config, PathsConfig, role
from experiments.options.roles import ConfigError

__all__ = ["CONF", "GROUPS", "Config", "ConfigError", "PathsConfig", "load", "names", "role"]
