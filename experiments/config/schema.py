"""A checked configuration of one run, with its name and its folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from backbones.validation import OptionError, show, validate, validate_value
from experiments.config import groups, identity
from experiments.config.combinations import check_combinations
from experiments.config.removed_keys import without_removed
from experiments.config.run_options import RunOptions
from experiments.options.roles import ConfigError
from experiments.runtime.nested import flatten
from routing.errors import require


def _route_text(route: Any) -> Any:
    """Return the text of a route that YAML has read as a list or as null."""
    if route is None or isinstance(route, list):
        return "+".join(str(part) for part in route or ["none"])
    return route


def _without_repeated_route(values: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration without `routing.route`, a second copy of `route` in older files."""
    routing, route = values.get("routing"), values.get("route", "none")
    if not isinstance(routing, Mapping) or "route" not in routing:
        return values
    repeated = _route_text(routing["route"])
    require(
        repeated in ("none", route),
        f"routing.route={repeated}: expected route={repeated} at the top level, where the "
        f"configuration has route={route}",
        ConfigError,
    )
    remaining = {key: value for key, value in routing.items() if key != "route"}
    return {**values, "routing": remaining}


def _composed_groups(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the plain values of the groups, each with a name."""
    composed = {}
    for group in groups.REQUIRED_GROUPS:
        require(group in values, f"missing key {group}: expected a mapping of keys", OptionError)
        composed[group] = validate_value(dict[str, Any], values[group], group)
        require(
            "name" in composed[group],
            f"missing key {group}.name: choose one with {group}=NAME",
            OptionError,
        )
    _check_integers(composed)
    return composed


def _check_integers(values: Mapping[str, Any]) -> None:
    for key, value in flatten(values).items():
        if isinstance(value, int) and abs(value) >= 2**63:
            raise OptionError(f"{key}={value}: expected an integer below 2^63")


@dataclass(frozen=True)
class Config(RunOptions):
    """One run: its options, checked by `from_dict`, and the identity that follows from them."""

    #: The groups' values as they were composed, which `config.yaml` and the hash hold: 2 and 2.0
    #: are the same option and have different hashes.
    composed: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """Build and check a configuration from plain values, as a run's `config.yaml` holds them.

        Raises:
            UserError: A key, a value or a combination that cannot be run.
        """
        require(
            isinstance(values, Mapping),
            f"the configuration={show(values)}: expected a mapping of keys",
            OptionError,
        )
        values = without_removed(values)
        # YAML reads an unquoted route or size as a list, as null or as a number.
        if "route" in values:
            values["route"] = _route_text(values["route"])
        values = _without_repeated_route(values)
        if isinstance(values.get("size"), int | float):
            values["size"] = str(values["size"])
        composed = _composed_groups(values)
        parsed = {group: groups.parse(group, options) for group, options in composed.items()}
        options = validate(RunOptions, {**values, **parsed})
        config = cls(**vars(options), composed=composed)
        _check_integers(config.to_dict())
        check_combinations(config)
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return plain, JSON-able values; `from_dict` inverts it."""
        values = dataclasses.asdict(self)
        composed = values.pop("composed")
        return json.loads(json.dumps(values | composed))

    def with_data(self, values: Mapping[str, Any]) -> Config:
        """Return this configuration with other values of `data.`."""
        composed = {**self.composed, "data": dict(values)}
        return dataclasses.replace(self, data=groups.parse("data", values), composed=composed)

    def check_processes(self, count: int, on_gpu: bool) -> None:
        """Refuse what this number of processes, on GPUs or on CPUs, cannot do."""
        require(
            self.train.batch % count == 0,
            f"train.batch={self.train.batch}: expected a multiple of the {count} processes",
            ConfigError,
        )
        if self.train.graphs is True and not on_gpu:
            raise ConfigError("train.graphs=true: expected a CUDA GPU, there is none here")

    @cached_property
    def hashed(self) -> dict[str, Any]:
        """What the hash covers: all that decides what is learnt and how it is scored.

        Computed once: a run keeps its folder where pictures are added while it trains.
        """
        return identity.hashed_values(self, self.to_dict())

    @cached_property
    def hash(self) -> str:
        """First eight hexadecimal digits of the SHA-256 of `hashed`."""
        text = json.dumps(self.hashed, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @property
    def name(self) -> str:
        """The run folder's name: `<backbone>-<size>-<data>_<route>_s<seed>-<hash>`."""
        model = f"{self.backbone.name}-{self.size.replace('/', '')}-{self.data.name}"
        # A schedule of routes (2-8/0.9:none) has characters that file names may not have.
        route = self.resolved_route.replace("/", "~").replace(":", "=")
        return f"{model}_{route}_s{self.seed}-{self.hash}"

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.paths.runs).expanduser() / self.name
