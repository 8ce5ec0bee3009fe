"""What a run is: its options, their composition and checks, its identity and its help."""

from experiments.config.compose import load
from experiments.config.groups import CONF, GROUPS, names
from experiments.config.identity import role
from experiments.config.schema import Config
from experiments.options.roles import ConfigError

__all__ = ["CONF", "GROUPS", "Config", "ConfigError", "load", "names", "role"]
