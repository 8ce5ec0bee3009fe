"""Hydra's composition of a run's configuration, with one sentence for every mistake in it.

`load(["backbone=mamba", "route=2-8"])` composes, checks and resolves (no torch here).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from backbones.registry import find, names
from experiments.config.parent import parent_digest
from experiments.config.schema import CONF, GROUPS, SHARED, Config
from experiments.data.data_options import describe, evaluation, options_class
from experiments.options.fields import ConfigError, flatten
from experiments.runtime.parsing import check_word
from routing.errors import suggest

# What to type for the words of other trainers that no key here looks like.
OTHER_WORDS = {
    "type train.steps=": "epochs num_epochs max_epochs iterations",
    "type train.micro_batch=": "accumulate accumulation grad_accum gradient_accumulation_steps",
    "type train.precision=": "amp dtype fp16 bf16 fp32",
    "type guidance.scale=": "cfg cfg_scale guidance_scale",
    "type backbone=": "model arch architecture network",
    "type backbone.width=": "hidden_size hidden_dim embed_dim d_model dim",
    "type backbone.depth=": "num_layers n_layers layers blocks",
    "type size=T/2 for a patch of 2": "patch patch_size",
    "type route=2-8@0.75 for a rate of 0.75": "rate selection_rate",
    "type paths.runs=": "out out_dir output output_dir results_dir save_dir",
    "type data.path=": "data_dir data_path data_root dataset_path",
    "type init=": "ckpt ckpt_path pretrained weights finetune",
    "type log=wandb or log=tensorboard": "logger report_to tracker wandb tensorboard",
    "the same command again resumes a run": "resume resume_from restart",
    "a GPU is used where there is one": "device devices gpu gpus cuda",
}


def load(overrides: Sequence[str] = ()) -> Config:
    """Compose the configuration of one run from `key=value` overrides, and check it.

    Args:
        overrides: As typed: `backbone=mamba`, `route=2-8`, `train.steps=100`, `scale=small`.

    Raises:
        ConfigError: An unknown key or name, a wrong value or an impossible combination.
    """
    # null is what stands there already, and Hydra has no word for it.
    overrides = [tidy(text) for text in overrides if text.strip() != "experiment=null"]
    pairs = [tuple(text.split("=", 1)) for text in overrides]
    groups = [(key, value) for key, value in pairs if key in GROUPS]
    for key, value in groups:
        _check_single(key, value)
        if value not in (available := options_of(key)):
            guess = suggest(value, available).replace("did you mean ", f"did you mean {key}=")
            listed = " ".join(available)
            raise ConfigError(f"unknown {key} {value!r}{guess} (available: {listed})")
    base, known = _base(tuple(f"{key}={value}" for key, value in groups))
    for key, value in pairs:
        if key in GROUPS:
            continue
        if below := [name for name in known if name.startswith(f"{key}.")]:
            raise ConfigError(
                f"{key} is a group of keys, not a key: type one of {key}.{{...}}, for example "
                f"{below[0]}=..."
            )
        if key not in known:
            raise ConfigError(_unknown(key, known, base))
        _check_single(key, value)
    config = Config.from_dict(_compose(overrides))
    if config.init:
        # Only where a run is about to start: a saved configuration may outlive its parent.
        parent_digest(config.init)
    describe(config.data)  # refuses latents that are not of data.shape
    return config


@functools.lru_cache(maxsize=64)
def _base(groups: tuple[str, ...]) -> tuple[Mapping[str, Any], list[str]]:
    """Return the values before single keys are set, and all keys; the runs of a sweep share it."""
    base = _compose(groups)
    return base, sorted(flatten(base))


def tidy(text: str) -> str:
    """Return one override in the form Hydra takes, or say what is wrong with it."""
    text = text.strip()
    check_word(text)
    if "=" not in text or text.startswith("="):
        guess = suggest(text, ["--dry-run", "--help"]) if text.startswith("-") else ""
        raise ConfigError(
            f"expected key=value, got {text!r}: for example backbone=mamba route=2-8{guess}"
        )
    key, value = text.split("=", 1)
    if key[0] == "-":
        raise ConfigError(f"{key}: keys have no dashes; type {key.lstrip('-')}={value}")
    if key[0] in "+~":
        raise ConfigError(
            f"{key}: keys can be set, not added or removed; type {key.lstrip('+~')}={value}"
        )
    if key == "route":
        value = value.strip("'\"")
        point = re.sub(r"@(\d*),(?=\d)", r"@\1.", value)
        if point != value:
            raise ConfigError(f"route={value}: a rate has a decimal point; type route={point}")
        if "," in value and not value.startswith("["):
            raise ConfigError(
                f"route={value}: a comma makes a sweep; join routes with '+': "
                f"route='{'+'.join(part.strip() for part in value.split(','))}'"
            )
        if not value.startswith("["):
            # Quoted, so that no character of the route grammar means anything to Hydra.
            value = "'" + value.replace("'", "") + "'"
    return readable(f"{key}={value}")


def readable(override: str) -> str:
    """Return an override that Hydra reads: a value that its grammar has no rule for is quoted.

    A path may hold letters beyond ASCII, quotes, `#`, `~` or `(`, which mean nothing else there.
    """
    key, value = override.split("=", 1)
    if re.fullmatch(r"[\w./:@%+*?,-]*", value, re.ASCII):
        return override
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        OverridesParser.create().parse_override(override)
    except HydraException:
        # Backslashes count only before a quote, where each stands for itself once doubled.
        inside = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
        return f"{key}='{inside}'"
    return override


def _check_single(key: str, value: str) -> None:
    if "," in value and not set(value) & set("'\"[{(\\"):
        as_one = (
            f", {key}=[{value}] where the value is a list, or \"{key}='{value}'\" where the comma "
            "is part of a name"
        )
        raise ConfigError(
            f"{key}={value}: one run takes one value; type python experiments/run.py -m "
            f"{key}={value} to run each{'' if key in GROUPS else as_one}"
        )


def _unknown(key: str, known: Sequence[str], base: Mapping[str, Any]) -> str:
    group, _, rest = key.partition(".")
    if rest and group in GROUPS and isinstance(chosen := base.get(group), Mapping):
        able = [f"{group}={name}" for name in options_of(group) if rest in _node(group, name)]
        if able:
            had = f"{group}={chosen['name']} has no {rest}"
            return f"{had}; type {' or '.join(able)} too, which has one"
    word = key.rpartition(".")[2].lower()
    ours = next((name for name, words in OTHER_WORDS.items() if word in words.split()), "")
    guess = f"; {ours}" if ours else suggest(key, [*GROUPS, *known])
    return f"unknown key {key}{guess} (python experiments/run.py --help all lists them)"


def options_of(group: str) -> list[str]:
    """Return the names a group can be set to: its YAML files, and any registered backbone."""
    files = {path.stem for path in (CONF / group).glob("*.yaml")}
    return sorted(files.union(names() if group == "backbone" else ()))


def register_resolvers() -> None:
    """Give the YAML files what a data set says of itself: `${evaluation:...}`, `${of_data:...}`."""
    from omegaconf import OmegaConf

    register = OmegaConf.register_new_resolver
    register("evaluation", evaluation, replace=True)
    # Values that a data set wants of a run's configuration: its `patch`, its `p_mean`.
    register("of_data", lambda n, k: getattr(options_class(n), k), replace=True)
    # Of a `~` Hydra would make a folder of that name.
    register("runs", lambda *, _root_: str(Path(_root_.paths.runs).expanduser()), replace=True)


def outside_node(name: str) -> dict[str, Any]:
    """Return the configuration of a backbone that has no YAML file."""
    return {"name": name, **dataclasses.asdict(find(name).options()), **SHARED}


def _node(group: str, name: str) -> Mapping[str, Any]:
    if group == "backbone":
        return outside_node(name)
    return yaml.safe_load((CONF / group / f"{name}.yaml").read_text()) or {}


def complete(argv: Sequence[str]) -> None:
    """Answer a shell that completes a word (query=SHELL), or print what it runs (install=SHELL)."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    register_resolvers()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        hydra.shell_completion("config", [word for word in argv if not word.startswith("-")])


def _compose(overrides: Sequence[str]) -> dict[str, Any]:
    return plain_values(compose_unresolved(overrides), overrides)


def compose_unresolved(overrides: Sequence[str]) -> Any:
    """Return what Hydra composes from tidy overrides, as a `DictConfig` with interpolations."""
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    register_resolvers()
    for name in names():  # those without a YAML file were registered by other code
        if not (CONF / "backbone" / f"{name}.yaml").exists():
            ConfigStore.instance().store(name, outside_node(name), group="backbone")
    held = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return compose("config", overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise _unreadable(overrides, error) from error
    finally:
        GlobalHydra.instance().hydra = held


def plain_values(composed: Any, overrides: Sequence[str]) -> dict[str, Any]:
    """Resolve a composition's interpolations; `overrides` name its scale and its experiment."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        values = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise _unreadable(overrides, error) from error
    assert isinstance(values, dict)
    chosen = dict(text.split("=", 1) for text in overrides)
    values |= {"scale": chosen.get("scale", "tiny"), "experiment": chosen.get("experiment")}
    return {str(key): value for key, value in values.items()}


def _unreadable(overrides: Sequence[str], error: Exception) -> ConfigError:
    reason = " ".join(str(error).split("\n")[0].split())
    return ConfigError(f"cannot read {' '.join(overrides)}: {reason}")
