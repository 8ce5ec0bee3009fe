"""What a run is: a typed configuration composed by Hydra, its hash and its name (no torch here).

The YAML under `conf/` lists every option with its default; the dataclasses below give types and
checks.
`load(["backbone=mamba", "route=2-8"])` composes, checks and resolves; every mistake is one
`ConfigError`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.checks import check
from experiments.typed import ConfigError, build
from routing.errors import suggest
from routing.options import RoutingOptions
from routing.schedule import RouteSchedule

CONF = Path(__file__).resolve().parent / "conf"
GROUPS = ("backbone", "data", "objective", "sampler", "guidance", "eval", "scale", "experiment")

# Keys that say where and how a run computes or reports, not what it learns: they stay out of the
# hash.
_NOT_HASHED = (
    "paths",
    "log",
    "dry",
    "scale",
    "experiment",
    "train.steps",
    "train.micro_batch",
    "train.threads",
    "train.log_every",
    "train.save_every",
    "train.keep",
    "train.keep_every",
    "train.sample_every",
    "train.rollback",
    "train.max_bad_steps",
)


@dataclass(frozen=True)
class TrainConfig:
    """Optimisation and bookkeeping of one run (TREAD: AdamW 1e-4, batch 256, EMA 0.9999)."""

    steps: int = 1000
    batch: int = 64
    micro_batch: int | str | None = None
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
    tf32: bool = True
    threads: int | None = None
    compile: str = "none"
    log_every: int = 10
    save_every: int = 200
    keep: int = 2
    keep_every: int = 0
    sample_every: int = 0
    max_bad_steps: int = 20
    rollback: int = 0
    loss: str = "plain"
    mae_weight: float = 0.1
    encoder: str = "none"
    align_weight: float = 0.5


@dataclass(frozen=True)
class PathsConfig:
    """Folders a run reads and writes."""

    runs: str = "runs"
    cache: str | None = None


@dataclass(frozen=True)
class Config:
    """One run; groups with options of their own stay mappings, which their owners type."""

    seed: int
    scale: str
    size: str
    route: str
    task: str
    backbone: dict[str, Any]
    data: dict[str, Any]
    objective: dict[str, Any]
    sampler: dict[str, Any]
    guidance: dict[str, Any]
    eval: dict[str, Any]
    routing: RoutingOptions = field(default_factory=RoutingOptions)
    train: TrainConfig = field(default_factory=TrainConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)
    init: str | None = None
    log: str = "none"
    dry: bool = False
    experiment: str | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """Build and check a configuration from plain values, as `config.yaml` holds them.

        Raises:
            ConfigError: A key is unknown, a type is wrong or a value is out of range.
        """
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
        for key in _NOT_HASHED:
            if key == "train.steps" and keep_steps:
                continue
            _drop(values, key)
        for group, key in (("guidance", "channels"), ("data", "shape")):
            # Not set, they leave runs that are older than these keys their names.
            if values[group].get(key) is None:
                values[group].pop(key, None)
        values["data_fingerprint"] = data_fingerprint(self.data)
        if self.init:
            from experiments.init import parent_digest

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


def data_fingerprint(options: Mapping[str, Any]) -> str:
    """Return what identifies the content of a data set: a version, or a manifest's checksum."""
    from experiments.data.facts import fingerprint

    return fingerprint(options)


def _drop(values: dict[str, Any], key: str) -> None:
    head, _, rest = key.partition(".")
    if rest:
        _drop(values.get(head, {}), rest)
    else:
        values.pop(head, None)


# --- composing -----------------------------------------------------------------------------------


def load(overrides: Sequence[str] = ()) -> Config:
    """Compose the configuration of one run from `key=value` overrides, and check it.

    Args:
        overrides: As typed: `backbone=mamba`, `route=2-8`, `train.steps=100`, `scale=small`.

    Raises:
        ConfigError: An unknown key or name, a wrong value or an impossible combination.
    """
    overrides = [tidy(text) for text in overrides]
    for text in overrides:
        if text.split("=", 1)[0] in GROUPS:
            _check_single(*text.split("=", 1))
        _check_group(*text.split("=", 1))
    base = _compose([t for t in overrides if t.split("=", 1)[0] in GROUPS])
    known = sorted(flatten(base))
    for text in overrides:
        key = text.split("=", 1)[0]
        if key not in GROUPS and key not in known and not _is_branch(key, known):
            raise ConfigError(_unknown(key, known, base))
        if _is_branch(key, known):
            raise ConfigError(
                f"{key} is a group of keys, not a key: type one of {key}.{{...}}, for example "
                f"{_first(key, known)}=..."
            )
        _check_single(*text.split("=", 1))
    config = Config.from_dict(_compose(overrides))
    if config.init:
        # Only where a run is about to start: a saved configuration may outlive its parent.
        from experiments.init import parent_digest

        parent_digest(config.init)
    from experiments.data.facts import facts

    facts(config.data)  # refuses latents that are not of data.shape
    return config


def tidy(text: str) -> str:
    """Return one override in the form Hydra takes, or say what is wrong with it."""
    text = text.strip()
    if "=" not in text or text.startswith("="):
        raise ConfigError(f"expected key=value, got {text!r}: for example backbone=mamba route=2-8")
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
    elif "=" in value and not _quoted(value):
        value = f"'{value}'"  # a bare one means something to Hydra
    return f"{key}={value}"


def _quoted(value: str) -> bool:
    return bool(set(value) & set("'\"[{(\\"))


def _check_single(key: str, value: str) -> None:
    if "," in value and not _quoted(value):
        raise ConfigError(
            f"{key}={value}: one run takes one value; type python experiments/run.py -m "
            f"{key}={value} to run each"
            + ("" if key in GROUPS else f", or {key}=[{value}] where the value is a list")
        )


def _unknown(key: str, known: Sequence[str], base: Mapping[str, Any]) -> str:
    group, _, rest = key.partition(".")
    if rest and group in GROUPS and isinstance(base.get(group), Mapping):
        others = [name for name in options_of(group) if _has_option(group, name, rest)]
        if others:
            chosen = base[group]["name"]
            return f"{group}={chosen} has no {rest}; type {group}={others[0]} too, which has one"
    leaves = [name for name in known if name.endswith(f".{key}")]
    guess = f"; did you mean {' or '.join(leaves[:3])}?" if leaves else suggest(key, known)
    return f"unknown key {key}{guess} (python experiments/run.py --help lists them)"


def _has_option(group: str, name: str, key: str) -> bool:
    from omegaconf import OmegaConf

    return key in OmegaConf.load(CONF / group / f"{name}.yaml")


def _check_group(group: str, value: str) -> None:
    if (
        group not in GROUPS
        or value in ("null", "none")
        and (CONF / group / f"{value}.yaml").exists()
    ):
        return
    if group == "experiment" and value == "null":
        return
    names = options_of(group)
    if value not in names:
        guess = suggest(value, names).replace("did you mean ", f"did you mean {group}=")
        raise ConfigError(f"unknown {group} {value!r}{guess} (available: {' '.join(names)})")


def options_of(group: str) -> list[str]:
    """Return the names a group can be set to: its YAML files."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def _compose(overrides: Sequence[str]) -> dict[str, Any]:
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    held = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            composed = compose("config", overrides=list(overrides))
            values = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split("\n")[0].split())
        raise ConfigError(f"cannot read {' '.join(overrides)}: {reason}") from error
    finally:
        GlobalHydra.instance().hydra = held
    assert isinstance(values, dict)
    for group in ("scale", "experiment"):
        chosen = [t.split("=", 1)[1] for t in overrides if t.startswith(f"{group}=")]
        values[group] = chosen[-1] if chosen and chosen[-1] != "null" else _default(group)
    return {str(key): value for key, value in values.items()}


def _default(group: str) -> str | None:
    return "tiny" if group == "scale" else None


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of nested mappings."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + str(key)


def _is_branch(key: str, known: Sequence[str]) -> bool:
    return key not in GROUPS and any(name.startswith(f"{key}.") for name in known)


def _first(key: str, known: Sequence[str]) -> str:
    return next(name for name in known if name.startswith(f"{key}."))
