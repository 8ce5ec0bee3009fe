"""Hydra's composition of a run's configuration, with one sentence for every mistake in it.

`load(["backbone=mamba", "route=2-8"])` composes and validates. Defaults and group names come from
the dataclasses of options (`experiments.config.groups`), presets from the YAML files in `conf/`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backbones.parsing import check_word
from experiments.config import groups
from experiments.config.groups import CONF, GROUPS
from experiments.config.parent import parent_digest
from experiments.config.removed_keys import without_removed_words
from experiments.config.schema import Config
from experiments.data.registry import OWN_PICTURES, evaluation_preset, options_class
from experiments.options.evaluation import EvalOptions
from experiments.options.roles import ConfigError, config_defaults
from experiments.runtime.nested import flatten
from routing.errors import require, suggest

#: Keys whose values are groups of keys.
SECTIONS = frozenset(("routing", "train", "paths"))


def load(overrides: Sequence[str] = ()) -> Config:
    """Compose the configuration of one run from `key=value` overrides, and validate it.

    Args:
        overrides: As typed: `backbone=mamba`, `route=2-8`, `train.steps=100`, `scale=small`.

    Raises:
        UserError: An unknown key or name, a wrong value or an impossible combination.
    """
    normalized = []
    for override in overrides:
        if override.strip() != "experiment=null":  # the default, which Hydra does not accept
            normalized.append(normalize(override))
    normalized = without_removed_words(normalized)
    selections = []
    for override in normalized:
        key, value = override.split("=", 1)
        if key in GROUPS:
            _check_single(key, value)
            groups.check_name(key, value)
            selections.append(override)
    keys = []
    for override in normalized:
        key, value = override.split("=", 1)
        if key not in GROUPS:
            keys.append(key)
            if key in SECTIONS or not _is_single(value):
                _check_keys(keys, tuple(selections))  # a wrong key comes before its value
            _check_single(key, value)
    try:
        values = compose(normalized)
    except ValueError:  # of this module, or Hydra's own where a list gets a key
        _check_keys(keys, tuple(selections))  # names an unknown key better than Hydra
        raise
    config = Config.from_dict(values)
    if config.init:
        # Only where a run is about to start: a saved configuration may outlive its parent.
        parent_digest(config.init)
    return config


def compose(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the plain values that Hydra composes from normalized overrides."""
    return plain_values(compose_unresolved(overrides), overrides)


def compose_unresolved(overrides: Sequence[str]) -> Any:
    """Return what Hydra composes from normalized overrides: a `DictConfig` with interpolations."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    register()
    previous = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return hydra_compose("config", overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise _unreadable(overrides, error) from error
    finally:
        GlobalHydra.instance().hydra = previous


def plain_values(composed: Any, overrides: Sequence[str]) -> dict[str, Any]:
    """Resolve a composition's interpolations; `overrides` name its scale and its experiment."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        values = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise _unreadable(overrides, error) from error
    assert isinstance(values, dict)
    selected = dict(override.split("=", 1) for override in overrides)
    values["scale"] = selected.get("scale", "tiny")
    values["experiment"] = selected.get("experiment")
    return {str(key): value for key, value in values.items()}


def _unreadable(overrides: Sequence[str], error: Exception) -> ConfigError:
    reason = " ".join(str(error).split("\n")[0].split())
    return ConfigError(f"cannot read {' '.join(overrides)}: {reason}")


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
    for key, value in config_defaults(Config).items():
        if key not in GROUPS:
            root[key] = value
    store.store("config", root)
    store.store("base", config_defaults(EvalOptions), group="eval")
    for group in GROUPS:
        if group not in groups.PRESETS:
            for name in groups.names(group):
                store.store(name, groups.defaults(group, name), group=group)


@functools.lru_cache(maxsize=64)
def _valid_keys(selections: tuple[str, ...]) -> list[str]:
    """Return every key of a configuration with these groups; the runs of a sweep share it."""
    return sorted(flatten(compose(selections)))


def _check_keys(keys: Sequence[str], selections: tuple[str, ...]) -> None:
    """Refuse the first key that a configuration with these groups does not have."""
    valid_keys = _valid_keys(selections)
    for key in keys:
        if key not in valid_keys:
            raise _unknown_key(key, valid_keys)


def _unknown_key(key: str, valid_keys: Sequence[str]) -> ConfigError:
    below = [name for name in valid_keys if name.startswith(f"{key}.")]
    example = "".join(f", such as {name}=" for name in below[:1])
    if below:
        return ConfigError(f"{key} is a group of keys: expected {key}.KEY=VALUE{example}")
    group, _, option = key.partition(".")
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
    closest = suggest(key, [*GROUPS, *valid_keys])
    return ConfigError(
        f"unknown key {key}{closest} (python experiments/run.py --help all lists all keys)"
    )


# --- from the command line to Hydra's grammar -----------------------------------------------------


def normalize(text: str) -> str:
    """Return one override in the form that Hydra takes.

    Raises:
        ConfigError: It is not `key=value`.
    """
    text = text.strip()
    check_word(text)
    if "=" not in text or text.startswith("="):
        hint = suggest(text, ["--dry-run", "--help"]) if text.startswith("-") else ""
        raise ConfigError(
            f"expected key=value, got {text!r}: for example backbone=mamba route=2-8{hint}"
        )
    key, value = text.split("=", 1)
    plain = key.lstrip("-+~")
    if plain != key:
        raise ConfigError(f"{key}={value}: expected {plain}={value}")
    if key == "route":
        value = _normalize_route(value.strip("'\""))
    return quote(f"{key}={value}")


def _normalize_route(value: str) -> str:
    if value.startswith("["):
        return value
    with_point = re.sub(r"@(\d*),(?=\d)", r"@\1.", value)
    if with_point != value:
        raise ConfigError(f"route={value}: expected a decimal point, as in route={with_point}")
    if "," in value:
        joined = "+".join(part.strip() for part in value.split(","))
        raise ConfigError(f"route={value}: expected one route; two are joined as route='{joined}'")
    # Quoted, because characters of a route have a meaning in Hydra's grammar.
    return "'" + value.replace("'", "") + "'"


def quote(override: str) -> str:
    """Return an override whose value is quoted where Hydra's grammar could not read it.

    A path may hold letters beyond ASCII, quotes, `#`, `~` or `(`, which mean something else there.
    """
    key, value = override.split("=", 1)
    if re.fullmatch(r"[\w./:@%+*?,-]*", value, re.ASCII):
        return override
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        OverridesParser.create().parse_override(override)
    except HydraException:
        # Hydra reads backslashes as escapes only before a quote; doubled, each is one backslash.
        escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
        return f"{key}='{escaped}'"
    return override


def _is_single(value: str) -> bool:
    """Whether a value is no list of several without brackets."""
    return "," not in value or bool(set(value) & set("'\"[{(\\"))


def _check_single(key: str, value: str) -> None:
    require(
        _is_single(value),
        f"{key}={value}: expected one value; -m runs each of several, and a list is typed as "
        f"{key}=[{value}]",
        ConfigError,
    )


def complete(argv: Sequence[str]) -> None:
    """Complete a word for a shell (query=SHELL), or print what sets it up (install=SHELL)."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        hydra.shell_completion("config", [name for name in argv if not name.startswith("-")])
