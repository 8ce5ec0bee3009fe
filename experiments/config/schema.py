"""What a run is: its typed keys and their roles, its hash and its name (no torch here).

The YAML under `conf/` lists every option with its default; the dataclasses below give types and
roles. `experiments.config.compose.load` makes one from what was typed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.config.ranges import check
from experiments.config.typed import ConfigError, build
from routing.options import RoutingOptions
from routing.schedule import RouteSchedule

CONF = Path(__file__).resolve().parents[1] / "conf"
GROUPS = ("backbone", "data", "objective", "sampler", "guidance", "eval", "scale", "experiment")

ROLES = ("learns", "routes", "scores", "reports")


def _role(role: str, default: Any = dataclasses.MISSING, **parts: str) -> Any:
    """Declare a key with its role; `parts` are keys below a group that have another one.

    learns   decides what is learnt: other values are another experiment
    routes   what is done to the tokens while training: the treatment that tables compare
    scores   how samples are made and measured
    reports  where and how a run computes and what it leaves on disk: the same run

    Hash, grouping of runs, budgets and display names follow from the roles.
    """
    assert role in ROLES
    return field(default=default, metadata={"role": role, "parts": parts})


@dataclass(frozen=True)
class TrainConfig:
    """Optimisation and bookkeeping of one run (TREAD: AdamW 1e-4, batch 256, EMA 0.9999)."""

    steps: int = _role("reports", 1000)
    batch: int = 64
    micro_batch: int | str | None = _role("reports", None)
    lr: float = 1e-4
    warmup: int = 0
    schedule: str = "constant"
    betas: tuple[float, ...] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float | None = None
    ema: float = 0.9999
    label_drop: float = 0.1
    precision: str = "fp32"
    tf32: bool = _role("reports", True)
    threads: int | None = _role("reports", None)
    compile: str = _role("reports", "none")
    log_every: int = _role("reports", 10)
    save_every: int = _role("reports", 200)
    keep: int = _role("reports", 2)
    keep_every: int = _role("reports", 0)
    sample_every: int = _role("reports", 0)
    max_bad_steps: int = _role("reports", 20)
    rollback: int = _role("reports", 0)
    loss: str = _role("routes", "plain")
    mae_weight: float = _role("routes", 0.1)
    encoder: str = _role("routes", "none")
    align_weight: float = _role("routes", 0.5)


@dataclass(frozen=True)
class PathsConfig:
    """Folders a run reads and writes."""

    runs: str = "runs"
    cache: str | None = None


@dataclass(frozen=True)
class Config:
    """One run; groups with options of their own stay mappings, which their owners type."""

    seed: int
    scale: str = _role("reports")
    size: str
    route: str = _role("routes")
    task: str
    backbone: dict[str, Any] = _role("learns", decoder="routes", align="routes")
    data: dict[str, Any]
    objective: dict[str, Any]
    sampler: dict[str, Any] = _role("scores")
    guidance: dict[str, Any] = _role("scores")
    eval: dict[str, Any] = _role("scores")
    routing: RoutingOptions = field(
        default_factory=RoutingOptions, metadata={"role": "routes"}
    )
    train: TrainConfig = field(default_factory=TrainConfig)
    paths: PathsConfig = field(default_factory=PathsConfig, metadata={"role": "reports"})
    init: str | None = None
    log: str = _role("reports", "none")
    dry: bool = _role("reports", False)
    experiment: str | None = _role("reports", None)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """Build and check a configuration from plain values, as `config.yaml` holds them.

        Raises:
            ConfigError: A key is unknown, a type is wrong or a value is out of range.
        """
        _check_range(values, "")
        config = build(cls, values)
        # The route is typed at the top (route=2-8); the routing options carry it to where it acts.
        routing = dataclasses.replace(config.routing, route=config.route)
        config = dataclasses.replace(config, routing=routing)
        check(config)
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return plain, JSON-able values; `Config.from_dict` inverts it."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @property
    def depth(self) -> int:
        """Number of blocks of the backbone."""
        from backbones.sizes import parse_size

        return int(self.backbone.get("depth") or parse_size(self.size).depth)

    @property
    def resolved_route(self) -> str:
        """The route with absolute block numbers, as it names the run."""
        return str(RouteSchedule.parse(self.route).resolve(self.depth))

    def hashed(self) -> dict[str, Any]:
        """What the hash is taken of: all that decides what is learnt and how it is scored."""
        values = self.to_dict()
        values["route"] = self.resolved_route
        del values["routing"]["route"]
        # With a schedule that ends at the last step, another number of steps is another run.
        keep_steps = self.train.schedule != "constant" or (
            self.resolved_route != "none"
            and (
                self.routing.schedule != "constant"
                or self.routing.off_after < 1
                or "/" in self.route
            )
        )
        steps = values["train"]["steps"]
        values = _without(values, "reports")
        # Hashed until they were found to be reports: their defaults keep the names of older runs.
        values["train"].update(compile="none", tf32=True)
        if keep_steps:
            values["train"]["steps"] = steps
        for group, key in (("guidance", "channels"), ("data", "shape")):
            # Not set, they leave runs that are older than these keys their names.
            if values[group].get(key) is None:
                values[group].pop(key, None)
        values["data_fingerprint"] = data_fingerprint(self.data)
        if self.init:
            from experiments.config.parent import parent_digest

            values["init"] = parent_digest(self.init)
        if values["route"] == "none":
            # A dense run has no use for these: two dense runs that differ in them are one run.
            values.pop("routing")
        return values

    @property
    def hash(self) -> str:
        """Eight hexadecimal digits of the SHA-256 of `hashed()`."""
        text = json.dumps(self.hashed(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @property
    def name(self) -> str:
        """The run folder's name: `<backbone>-<size>-<data>_<route>_s<seed>-<hash>`."""
        size = self.size.replace("/", "")
        head = f"{self.backbone['name']}-{size}-{self.data['name']}"
        # Stages of a schedule (2-8/0.9:none) are written with signs that file names may have.
        route = self.resolved_route.replace("/", "~").replace(":", "=")
        return f"{head}_{route}_s{self.seed}-{self.hash}"

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.paths.runs).expanduser() / self.name


def _check_range(value: Any, where: str) -> None:
    """Refuse whole numbers that no counter and no tensor holds, wherever they stand."""
    if isinstance(value, Mapping | list | tuple):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in pairs:
            _check_range(item, f"{where}.{key}" if where else str(key))
    elif isinstance(value, int) and abs(value) >= 2**63:
        raise ConfigError(f"{where}={value}: expected a number below 2^63")


def data_fingerprint(options: Mapping[str, Any]) -> str:
    """Return what identifies the content of a data set: a version, or a manifest's checksum."""
    from experiments.data.facts import fingerprint

    return fingerprint(options)


def role(key: str) -> str:
    """Return the role of a dotted key, such as `train.lr`; what no class declares is learnt.

    Args:
        key: A leaf or a group; of a configuration of another version, it may be unknown.
    """
    found, cls, parts = "learns", Config, {}
    for name in key.split("."):
        declared = {f.name: f for f in dataclasses.fields(cls)}.get(name) if cls else None
        if declared is None:
            return parts.get(name, found)
        found, parts = declared.metadata.get("role", found), declared.metadata.get("parts", {})
        made = declared.default_factory
        cls = made if dataclasses.is_dataclass(made) else None
    return found


def _without(values: Mapping[str, Any], out: str, prefix: str = "") -> dict[str, Any]:
    """Leave out the keys of one role."""
    kept = {}
    for key, value in values.items():
        if role(prefix + key) != out:
            inner = isinstance(value, Mapping)
            kept[key] = _without(value, out, f"{prefix}{key}.") if inner else value
    return kept
