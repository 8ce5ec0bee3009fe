"""Overrides of sampler, guidance and data options for sampling: `guidance.scale=2`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from backbones.parsing import Malformed, yaml_of
from experiments.config.groups import parse
from experiments.config.removed_keys import without_removed
from experiments.options.guidance import GuidanceOptions
from experiments.options.roles import ConfigError
from experiments.options.sampler import SamplerOptions
from routing.errors import require, suggest

#: Groups of a run's configuration that may be changed for sampling.
GROUPS = ("sampler", "guidance", "data")
#: Command-line flags, and the keys that they set.
FLAGS = {
    "steps": "sampler.steps",
    "scale": "guidance.scale",
    "sampler": "sampler.name",
    "guidance": "guidance.name",
}


def parse_overrides(overrides: Sequence[str], **flags: Any) -> dict[str, dict[str, Any]]:
    """Parse overrides such as `guidance.scale=2` into one mapping per group.

    `flags` are values of some of `FLAGS`; None means that a flag was not given. Those of
    sampler and guidance may have options: `cfg,scale=2`.
    """
    items = list(overrides)
    for name, value in flags.items():
        if value is None:
            continue
        if name in ("sampler", "guidance"):
            items += _group_overrides(name, value)
        else:
            items.append(f"{FLAGS[name]}={value}")
    values: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    for item in items:
        key, _, text = item.partition("=")
        group, name = _split_key(item)
        require(
            name not in values[group],
            f"{key} is given twice, also as {text}; give one of the two",
            ConfigError,
        )
        try:
            values[group][name] = yaml_of(text, item)
        except Malformed:
            values[group][name] = text  # a path, such as one that begins with a bracket
    return without_removed(values)


def _group_overrides(group: str, choice: str) -> list[str]:
    """Return `NAME[,KEY=VALUE...]` as overrides `group.KEY=VALUE`.

    An empty name keeps the run's own.
    """
    name, *options = choice.split(",")
    require(
        "=" not in name, f"--{group} {choice}: a name comes first, as in NAME,{choice}", ConfigError
    )
    overrides = [f"{group}.name={name}"] if name else []
    for option in options:
        overrides.append(f"{group}.{option}")
    return overrides


def _split_key(item: str) -> tuple[str, str]:
    """Return group and name of an override, or refuse it."""
    key, equals, value = item.partition("=")
    group, dot, name = key.partition(".")
    if group in GROUPS and dot and equals:
        return group, name
    hint = ""
    if key in FLAGS:
        hint = f"; type --{key} {value}"
    elif not equals and not dot:
        hint = "; a list is one word, such as 3,7"
    elif group not in GROUPS:
        hint = suggest(group, GROUPS)
    expected = ", ".join(f"{name}.KEY=VALUE" for name in GROUPS)
    raise ConfigError(f"{item}: sampling can change {expected}{hint}")


def chosen_options(
    kind: str, configured: SamplerOptions | GuidanceOptions | None, changes: Mapping[str, Any]
) -> Any:
    """Return the changed options of a group.

    They start from the run's own options, or from the defaults where `changes` has another name.
    """
    values = dict(changes)
    if configured is not None and changes.get("name", configured.name) == configured.name:
        values = {**asdict(configured), **changes}
    options = parse(kind, values)
    if options.name == "none" and changes.get("scale") is not None and options.scale != 1:
        raise ConfigError(f"scale {options.scale:g}: there is no guidance; add --guidance cfg")
    return options


def describe_options(options: Any) -> str:
    """Return options as `name key=value ...`: steps, scale and what differs from its default."""
    parts = [options.name]
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name == "name":
            continue
        if field.name in ("steps", "scale") or value != field.default:
            parts.append(f"{field.name}={value}")
    return " ".join(parts)
