"""Which options of a run its hash covers, and what each of them decides."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from backbones.validation import fields_of
from experiments.config.groups import REQUIRED_GROUPS, option_classes
from experiments.config.parent import parent_digest
from experiments.config.removed_keys import insert_removed
from experiments.config.run_options import RunOptions
from experiments.options.model import SharedBackboneOptions
from experiments.options.roles import LEARNS, REPORTS, role_of
from experiments.options.training import TrainOptions
from routing.options import OMITTED_AT_DEFAULT, RoutingOptions

# Options that are paths, by group.
_PATHS = {
    "data": ("path", "test", "vae"),
    "eval": ("reference", "inception_weights", "dinov2_weights"),
}


def role(key: str) -> str:
    """Return what a dotted key decides (`experiments.options.roles`); `learns` if undeclared."""
    name, _, key_in_group = key.partition(".")
    declared = role_of(RunOptions, name)
    below = {"train": TrainOptions, "backbone": SharedBackboneOptions}.get(name)
    if declared is None and below is not None:
        declared = role_of(below, key_in_group.partition(".")[0])
    return (declared or LEARNS).name


def hashed_values(options: RunOptions, values: dict[str, Any]) -> dict[str, Any]:
    """Return what the hash covers: all that decides what is learnt and how it is scored.

    Args:
        options: The options of a run.
        values: The same as plain values, as composed.
    """
    steps = values["train"]["steps"]
    values = _without_reports(values)
    values["route"] = options.resolved_route
    # Neither key affects the result; they were hashed by mistake. Their former defaults keep the
    # names of older runs valid.
    values["train"].update(compile="none", tf32=True)
    if _ends_with_its_schedule(options):
        values["train"]["steps"] = steps
    _omit_defaults(values)
    insert_removed(values)
    for key in options.data.location_keys:
        values["data"].pop(key, None)
    values["data"] |= options.data.path_fingerprints()
    values["eval"] |= options.eval.path_fingerprints()
    values["data_fingerprint"] = options.data.fingerprint()
    if options.init:
        values["init"] = parent_digest(options.init)
    if values["route"] == "none":
        # Two dense runs that differ in how tokens would be routed are one run.
        values.pop("routing")
    return values


def with_paths_replaced(
    saved: Mapping[str, Any], options: RunOptions, hashed: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a run of an earlier version hashed, as this version would hash it.

    Earlier versions hashed paths as they were typed. A path to the same file or folder as that of
    `options`, whose hashed values are `hashed`, is replaced by what stands for it there.
    """
    values = dict(saved)
    for group, names in _PATHS.items():
        values[group] = dict(saved.get(group) or {})
        for name in names:
            typed, current = values[group].get(name), getattr(getattr(options, group), name, None)
            if isinstance(typed, str) and current is not None and _is_same_place(typed, current):
                del values[group][name]
                if name in hashed[group]:
                    values[group][name] = hashed[group][name]
    return values


def _is_same_place(one: str, other: str) -> bool:
    return os.path.realpath(os.path.expanduser(one)) == os.path.realpath(os.path.expanduser(other))


def _ends_with_its_schedule(options: RunOptions) -> bool:
    """Whether a schedule ends at the last step: another number of steps is another run."""
    routing = options.routing
    scheduled = routing.schedule != "constant" or routing.off_after < 1 or "/" in options.route
    return options.train.schedule != "constant" or (scheduled and options.resolved_route != "none")


def _omit_defaults(values: dict[str, Any]) -> None:
    """Remove the options that are marked `OMITTED_AT_DEFAULT` and have their default."""
    classes: dict[str, list[type]] = {"train": [TrainOptions], "routing": [RoutingOptions]}
    for group in REQUIRED_GROUPS:
        classes[group] = option_classes(group, values[group]["name"])
    for group, dataclasses_of_group in classes.items():
        options = values[group]
        for dataclass_of_options in dataclasses_of_group:
            for name, field in fields_of(dataclass_of_options).items():
                is_marked = OMITTED_AT_DEFAULT in field.metadata
                if is_marked and name in options and options[name] == field.default:
                    del options[name]


def _without_reports(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leave out the keys whose role is `reports`."""
    remaining: dict[str, Any] = {}
    for key, value in values.items():
        if role(prefix + key) == REPORTS.name:
            continue
        if isinstance(value, Mapping):
            value = _without_reports(value, f"{prefix}{key}.")
        remaining[key] = value
    return remaining
