"""The option groups of a run (`backbone=`, `data=` ...): which names each has, and their options.

The names come from the registries of backbones, data sets, objectives, samplers and guidance, and
from the presets in `conf/` (eval, scale, experiment).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from backbones import registry
from experiments.data import data_options
from experiments.options.evaluation import EvalOptions
from experiments.options.guidance import GUIDANCE
from experiments.options.model import SharedBackboneOptions
from experiments.options.objective import OBJECTIVES
from experiments.options.roles import config_defaults
from experiments.options.sampler import SAMPLERS

CONF = Path(__file__).resolve().parents[1] / "conf"
#: In the order in which `--help` lists them.
GROUPS = ("backbone", "data", "objective", "sampler", "guidance", "eval", "scale", "experiment")
#: Groups whose entries are YAML presets.
PRESETS = ("eval", "scale", "experiment")


def names(group: str) -> list[str]:
    """Return the names that a group can be set to."""
    if group in PRESETS:
        return sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    return sorted(_registry(group))


def option_classes(group: str, name: str) -> list[type]:
    """Return the dataclasses that hold the options of one entry of a group."""
    if group == "backbone":
        return [registry.find(name).options, SharedBackboneOptions]
    if group == "eval":
        return [EvalOptions]
    return [_registry(group)[name]]


def defaults(group: str, name: str) -> dict[str, Any]:
    """Return the options of one entry as Hydra composes them."""
    values: dict[str, Any] = {"name": name}
    for options in option_classes(group, name):
        values.update(config_defaults(options))
    return values


def _registry(group: str) -> dict[str, type]:
    if group == "backbone":
        return {name: registry.find(name).options for name in registry.names()}
    if group == "data":
        return {name: data_options.options_class(name) for name in data_options.names()}
    return {"objective": OBJECTIVES, "sampler": SAMPLERS, "guidance": GUIDANCE}[group]  # type: ignore[return-value]
