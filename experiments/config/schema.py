"""A checked configuration of one run, with its name and its folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from backbones.validation import validate
from experiments.config import identity
from experiments.config.combinations import check_combinations
from experiments.config.removed_keys import without_removed
from experiments.config.run_options import RunOptions
from experiments.options.roles import ConfigError
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


@dataclass(frozen=True)
class Config(RunOptions):
    """One run: its options, checked by `from_dict`, and the identity that follows from them."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """Build and check a configuration from plain values, as a run's `config.yaml` holds them.

        Raises:
            UserError: A key, a value or a combination that cannot be run.
        """
        if isinstance(values, Mapping):
            values = without_removed(values)
            # YAML reads an unquoted route or size as a list, as null or as a number.
            if "route" in values:
                values["route"] = _route_text(values["route"])
            values = _without_repeated_route(values)
            if isinstance(values.get("size"), int | float):
                values["size"] = str(values["size"])
        config: Config = validate(cls, values)
        check_combinations(config)
        return config

    def check_processes(self, count: int, on_gpu: bool) -> None:
        """Refuse what this number of processes, on GPUs or on CPUs, cannot do."""
        require(
            self.train.batch % count == 0,
            f"train.batch={self.train.batch}: expected a multiple of the {count} processes",
            ConfigError,
        )
        if self.train.graphs is True and not on_gpu:
            raise ConfigError("train.graphs=true: expected a CUDA GPU, there is none here")

    def hashed(self) -> dict[str, Any]:
        """Return what the hash covers: all that decides what is learnt and how it is scored."""
        return identity.hashed_values(self)

    @cached_property
    def hash(self) -> str:
        """First eight hexadecimal digits of the SHA-256 of `hashed()`.

        Computed once: a run keeps its folder where pictures are added while it trains.
        """
        text = json.dumps(self.hashed(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @property
    def name(self) -> str:
        """The run folder's name: `<backbone>-<size>-<data>_<route>_s<seed>-<hash>`."""
        model = f"{self.backbone['name']}-{self.size.replace('/', '')}-{self.data['name']}"
        # A schedule of routes (2-8/0.9:none) has characters that file names may not have.
        route = self.resolved_route.replace("/", "~").replace(":", "=")
        return f"{model}_{route}_s{self.seed}-{self.hash}"

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.paths.runs).expanduser() / self.name
