"""A run's configuration from the words of a command line, with one sentence for every mistake.

`load(["backbone=mamba", "route=2-8"])` composes and validates. Hydra composes the groups: their
defaults and names come from the dataclasses of options (`experiments.config.groups`), presets from
the YAML files in `conf/`. Single keys are set on the result, in order, as Hydra sets them; its
parser reads their values.

Composing the groups takes Hydra about 0.1 s, so their compositions are kept: the runs of a sweep
share a few.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.config import groups
from experiments.config.groups import CONF, GROUPS
from experiments.config.overrides import SeveralValues, normalize, value_of
from experiments.config.parent import parent_digest
from experiments.config.removed_keys import without_removed_words
from experiments.config.run_options import RunOptions
from experiments.config.schema import Config
from experiments.config.unknown_keys import unknown_key
from experiments.data.registry import evaluation_preset, options_class
from experiments.options.roles import ConfigError, config_defaults
from experiments.runtime.nested import flatten
from routing.errors import UserError


def load(overrides: Sequence[str] = ()) -> Config:
    """Compose the configuration of one run from `key=value` overrides, and validate it.

    Args:
        overrides: As typed: `backbone=mamba`, `route=2-8`, `train.steps=100`, `scale=small`.

    Raises:
        UserError: An unknown key or name, a wrong value or an impossible combination.
    """
    try:
        config = Config.from_dict(compose(overrides))
    except SeveralValues as error:
        raise ConfigError(f"{error}{_hint(overrides, error.override)}") from None
    if config.init:
        # Only where a run is about to start: a saved configuration may outlive its parent.
        parent_digest(config.init)
    return config


def _hint(overrides: Sequence[str], several: str) -> str:
    """Return how to type the value of an override that has commas: only what is then accepted."""
    key, value = several.split("=", 1)
    hint = "" if value.endswith(",") else "; -m runs each of several"
    others = [text for text in map(normalize, overrides) if text != several]
    for typed, meaning in (
        (f"[{value}]", "a list is typed as"),
        (f"'{value}'", "one with commas:"),
    ):
        with contextlib.suppress(UserError):
            Config.from_dict(compose([*others, f"{key}={typed}"]))
            return f'{hint}; {meaning} "{key}={typed}"'
    return hint


def compose(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the plain values that overrides stand for, before they are validated.

    Raises:
        UserError: An unknown key or group, or a value that cannot be read.
    """
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    selections, settings = _split(overrides)
    try:
        valid_keys = _valid_keys(selections)
        composed = copy.deepcopy(compose_by_hydra(selections))
        for setting in settings:
            key = setting.split("=", 1)[0]
            if key not in valid_keys:
                raise unknown_key(setting, valid_keys)
            OmegaConf.update(composed, key, value_of(setting), merge=True)
        return _plain_values(composed, selections)
    except (HydraException, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split("\n")[0].split())
        raise ConfigError(f"cannot read {' '.join(overrides)}: {reason}") from error


def _split(overrides: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Return the overrides that select a group's entry, and those that set a single key."""
    selections, settings = [], []
    for override in without_removed_words([normalize(override) for override in overrides]):
        key, value = override.split("=", 1)
        if key not in GROUPS:
            settings.append(override)
        elif override != "experiment=null":  # the default, which Hydra does not accept
            value_of(override)  # refuses several
            groups.check_name(key, value)
            selections.append(override)
    return tuple(selections), settings


@functools.lru_cache(maxsize=64)
def compose_by_hydra(overrides: tuple[str, ...]) -> Any:
    """Return what Hydra composes from normalized overrides: a `DictConfig` with interpolations."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    register()
    previous = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return hydra_compose("config", overrides=list(overrides))
    finally:
        GlobalHydra.instance().hydra = previous


def _plain_values(composed: Any, selections: Sequence[str]) -> dict[str, Any]:
    """Resolve a composition's interpolations; `selections` name its scale and its experiment."""
    from omegaconf import OmegaConf

    selected = dict(selection.split("=", 1) for selection in selections)
    values = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(values, dict)
    values["scale"] = selected.get("scale", "tiny")
    values["experiment"] = selected.get("experiment")
    return {str(key): value for key, value in values.items()}


def register() -> None:
    """Give Hydra the defaults of all options and the resolvers that they use."""
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("evaluation_preset", evaluation_preset, replace=True)
    # What a data set prefers: its patch, its p_mean, its guidance scale.
    OmegaConf.register_new_resolver(
        "data_default", lambda name, key: getattr(options_class(name), key), replace=True
    )
    # Hydra would make a folder called "~".
    OmegaConf.register_new_resolver(
        "runs", lambda *, _root_: str(Path(_root_.paths.runs).expanduser()), replace=True
    )
    _store_defaults(tuple(groups.names("backbone")))


@functools.cache
def _store_defaults(backbones: tuple[str, ...]) -> None:
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    root: dict[str, Any] = {
        "defaults": [
            "_self_",
            {"backbone": "dit"},
            {"data": "mnist"},
            {"objective": "edm"},
            {"sampler": "heun"},
            {"guidance": "cfg"},
            {"eval": "${evaluation_preset:${data}}"},
            {"scale": "tiny"},
            {"experiment": None},
        ]
    }
    for key, value in config_defaults(RunOptions).items():
        if key not in GROUPS:
            root[key] = value
    store.store("config", root)
    store.store("base", groups.defaults("eval", "digits"), group="eval")
    for group in GROUPS:
        if group not in groups.PRESETS:
            for name in groups.names(group):
                store.store(name, groups.defaults(group, name), group=group)


@functools.lru_cache(maxsize=64)
def _valid_keys(selections: tuple[str, ...]) -> frozenset[str]:
    """Return every key of a configuration with these groups that an override may set."""
    keys = flatten(_plain_values(compose_by_hydra(selections), selections))
    # Changing a name alone would leave the options of another entry behind it.
    return frozenset(keys) - {f"{group}.name" for group in GROUPS}
