"""What an option carries beside its type: its role, and a default that depends on other options.

    steps: Annotated[int, Ge(1), REPORTS, "Optimizer steps."] = 1000
    sigma_data: Annotated[float, Gt(0), Default("${objective.sigma_data}"), "..."] = 0.5

Types, ranges and comments are those of `backbones.validation`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from backbones.validation import OptionError, check_choice, fields_of, validate


@dataclasses.dataclass(frozen=True)
class Role:
    """What an option decides. Hashes, grouping of runs and budgets follow from it."""

    name: str


LEARNS = Role("learns")  # what is learnt: another value is another experiment
ROUTES = Role("routes")  # what happens to tokens in training: the variants that tables compare
SCORES = Role("scores")  # how samples are made and measured
REPORTS = Role("reports")  # where and how a run computes, and what it writes: the same run


@dataclasses.dataclass(frozen=True)
class Default:
    """A default that Hydra resolves from other options (`${...}`), instead of the field's own."""

    interpolation: str


ConfigError = OptionError


def parse_named(registry: Mapping[str, type], group: str, value: Any) -> Any:
    """Return the options that a value stands for.

    Args:
        registry: Dataclasses of options by name.
        group: The group, as in `objective=edm`.
        value: A name, a mapping with a `name` (other keys have defaults), options of the registry,
            or None for the registry's first entry.

    Raises:
        OptionError: An unknown name or key, or a wrong value.
    """
    if value is None:
        value = next(iter(registry))
    if isinstance(value, tuple(registry.values())):
        return value
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{group}={value}: expected a name, or a mapping with a name")
    name = value.get("name", next(iter(registry)))
    check_choice(name, sorted(registry), group)
    return validate(registry[name], value, f"{group}.")


def role_of(options: type, name: str) -> Role | None:
    """Return the declared role of a field, None without one or for a field that is not there."""
    field = fields_of(options).get(name)
    roles = [item for item in field.metadata if isinstance(item, Role)] if field else []
    return roles[0] if roles else None


def config_defaults(options: type) -> dict[str, Any]:
    """Return the defaults of a dataclass of options as Hydra composes them."""
    values = {}
    for name, field in fields_of(options).items():
        default = field.default
        if dataclasses.is_dataclass(default) and not isinstance(default, type):
            default = config_defaults(type(default))
        for item in field.metadata:
            if isinstance(item, Default):
                default = item.interpolation
        values[name] = list(default) if isinstance(default, tuple) else default
    return values
