"""The option groups of a run (`backbone=`, `data=` ...): which names each has, and their options.

The names come from the registries of backbones, data sets, objectives, samplers and guidance, and
from the presets in `conf/` (eval, scale, experiment).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backbones import registry
from backbones.sizes import BackboneError
from backbones.validation import check_choice, fields_of, validate
from experiments.data.registry import DATA_SETS, options_class
from experiments.data.registry import parse as parse_data
from experiments.options.evaluation import EvalOptions
from experiments.options.guidance import GUIDANCE
from experiments.options.model import BackboneOptions, SharedBackboneOptions
from experiments.options.objective import OBJECTIVES
from experiments.options.roles import config_defaults, parse_named
from experiments.options.sampler import SAMPLERS

CONF = Path(__file__).resolve().parents[1] / "conf"
#: In the order in which `--help` lists them.
GROUPS = ("backbone", "data", "objective", "sampler", "guidance", "eval", "scale", "experiment")
#: Groups that every configuration sets.
REQUIRED_GROUPS = ("backbone", "data", "objective", "sampler", "guidance", "eval")
#: Groups whose entries are YAML presets.
PRESETS = ("eval", "scale", "experiment")
#: Options of the entries of the groups that hold no model and no preset.
REGISTRIES: dict[str, Mapping[str, type]] = {
    "data": DATA_SETS,
    "objective": OBJECTIVES,
    "sampler": SAMPLERS,
    "guidance": GUIDANCE,
}


def names(group: str) -> list[str]:
    """Return the names that a group can be set to."""
    if group in PRESETS:
        return sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    return sorted(registry.names() if group == "backbone" else REGISTRIES[group])


def choosing_key(key: str) -> str:
    """Map `data.name` to `data`, the key that selects an entry; keep other keys."""
    group, _, option = key.partition(".")
    return group if group in GROUPS and option == "name" else key


def check_name(group: str, name: str) -> None:
    """Refuse a name that a group cannot be set to.

    Raises:
        UserError: The message suggests the closest name.
    """
    if group == "data":
        options_class(name)
    else:
        check_choice(name, names(group), group)


def option_classes(group: str, name: str) -> list[type]:
    """Return the dataclasses that hold the options of one entry of a group."""
    if group == "backbone":
        return [registry.find(name).options, SharedBackboneOptions]
    if group == "eval":
        return [EvalOptions]
    return [REGISTRIES[group][name]]


def defaults(group: str, name: str) -> dict[str, Any]:
    """Return the options of one entry as Hydra composes them."""
    values: dict[str, Any] = {"name": name}
    for options in option_classes(group, name):
        values.update(config_defaults(options))
    return values


def parse(group: str, values: Mapping[str, Any]) -> Any:
    """Return the validated options of one of `REQUIRED_GROUPS`.

    Args:
        group: As in `data=`.
        values: A mapping with a `name`, as a configuration holds it.

    Raises:
        UserError: An unknown name or key, or a wrong value.
    """
    if group == "backbone":
        return _parse_backbone(values)
    if group == "data":
        return parse_data(values)
    if group == "eval":
        return validate(EvalOptions, values, "eval.")
    return parse_named(REGISTRIES[group], group, values)


def _parse_backbone(values: Mapping[str, Any]) -> BackboneOptions:
    shared_names = fields_of(SharedBackboneOptions).keys()
    shared, family = {}, {}
    for key, value in values.items():
        if key in shared_names:
            shared[key] = value
        elif key != "name" and value is not None:  # null leaves the choice to the family
            family[key] = value
    common = validate(SharedBackboneOptions, shared, "backbone.")
    spec = registry.find(str(values["name"]))
    return BackboneOptions(**vars(common), name=spec.name, family=spec.build(family, shared_names))


def check_backbone(options: BackboneOptions, size: str, grid: tuple[int, int]) -> None:
    """Refuse options of a backbone that do not fit the size or the grid of patches (H, W)."""
    try:
        shape = options.shape(size)
    except BackboneError as error:
        is_option = str(error).startswith("heads=")
        raise BackboneError(f"backbone.{error}" if is_option else str(error)) from None
    registry.find(options.name).check_fit(shape, grid, options.family)
