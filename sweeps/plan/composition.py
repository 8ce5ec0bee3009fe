"""Configurations of many runs, of which Hydra composes the common part once.

Composing takes Hydra about 0.1 s, nearly all of it for the groups (`backbone=`, `scale=`, ...).
The runs of a sweep share a few combinations of groups and differ in single keys. Hydra sets single
keys on the composed groups, in order, before interpolations are resolved; so does this module.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

from experiments.config import GROUPS, Config, ConfigError
from experiments.config import compose as composition
from experiments.config import names as group_names
from experiments.config.parent import parent_digest
from experiments.data.data_options import ShapeError
from experiments.runtime.nested import flatten
from routing.errors import UserError
from routing.route import RouteFitError

# Errors of a cell that a grid may leave out, by the word in its `fits`.
_MISFITS: dict[str, type[UserError]] = {"route": RouteFitError, "data": ShapeError}


def is_misfit(error: UserError, fits: Sequence[str]) -> bool:
    """Return whether a stage with these `fits` leaves out a cell that has the error."""
    return isinstance(error, tuple(_MISFITS[kind] for kind in fits))


def load_config(overrides: Sequence[str]) -> Config:
    """Return the checked configuration of a run; the same as `experiments.config.load`.

    Raises:
        UserError: An unknown key, an invalid value or an impossible combination.
    """
    values = compose_cached(overrides)
    if values is None:
        return composition.load(overrides)  # which reports what is wrong
    config = Config.from_dict(values)
    if config.init:
        parent_digest(config.init)
    return config


def compose_cached(overrides: Sequence[str]) -> dict[str, Any] | None:
    """Return the plain values of a configuration, None for overrides that Hydra has to refuse."""
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    groups, single = [], []
    for override in overrides:
        key, _, name = override.partition("=")
        if key not in GROUPS:
            single.append(composition.normalize(override))
        elif override != "experiment=null":  # the default, which Hydra cannot be given
            if name not in group_names(key):
                return None
            groups.append(override)
    keys = _known_keys(tuple(groups))
    config = copy.deepcopy(_compose_groups(tuple(groups)))
    try:
        for override in single:
            key, value, has_several = _parse(override)
            if key not in keys or has_several:
                return None
            OmegaConf.update(config, key, value, merge=True)
        return composition.plain_values(config, groups)
    except (HydraException, OmegaConfBaseException, ConfigError):
        return None


@functools.lru_cache(maxsize=64)
def _compose_groups(groups: tuple[str, ...]) -> Any:
    """Return what Hydra composes from groups alone, with unresolved interpolations."""
    return composition.compose_unresolved(groups)


@functools.lru_cache(maxsize=64)
def _known_keys(groups: tuple[str, ...]) -> frozenset[str]:
    return frozenset(flatten(composition.plain_values(_compose_groups(groups), groups)))


@functools.lru_cache(maxsize=4096)
def _parse(override: str) -> tuple[str, Any, bool]:
    """Return the key and the value of an override, and whether it has several values."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_override(override)
    return parsed.get_key_element(), parsed.value(), parsed.is_sweep_override()
