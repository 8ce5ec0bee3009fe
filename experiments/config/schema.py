"""The configuration of a run: its keys, its identity (hash and name) and what it may combine."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from backbones.registry import find
from backbones.sizes import AlignOptions, parse_size
from backbones.validation import Choices, validate, validate_value
from experiments.config.parent import parent_digest
from experiments.config.removed_keys import insert_removed, without_removed
from experiments.data.data_options import TASKS, describe, fingerprint, location_keys, parse
from experiments.options.evaluation import EvalOptions
from experiments.options.guidance import GUIDANCE
from experiments.options.model import SharedBackboneOptions
from experiments.options.objective import OBJECTIVES
from experiments.options.roles import (
    LEARNS,
    REPORTS,
    ROUTES,
    SCORES,
    ConfigError,
    parse_named,
    role_of,
)
from experiments.options.sampler import SAMPLERS
from experiments.options.training import (
    ENCODERS,
    MOST_THREADS,
    SELF_ENCODER,
    PathsOptions,
    TrainOptions,
)
from experiments.runtime.nested import flatten
from routing.options import RoutingOptions
from routing.schedule import RouteSchedule

# Former names, until their users are moved.
TrainConfig = TrainOptions
PathsConfig = PathsOptions
__all__ = ["ENCODERS", "MOST_THREADS", "Config", "PathsConfig", "TrainConfig", "role"]

TRACKERS = ("none", "tensorboard", "wandb", "trackio")
#: Groups that every configuration sets.
REQUIRED_GROUPS = ("backbone", "data", "objective", "sampler", "guidance", "eval")


@dataclass(frozen=True)
class Config:
    """One run. Groups of options stay mappings, as they were composed and as they are hashed."""

    backbone: dict[str, Any]
    data: dict[str, Any]
    objective: dict[str, Any]
    sampler: Annotated[dict[str, Any], SCORES]
    guidance: Annotated[dict[str, Any], SCORES]
    eval: Annotated[dict[str, Any], SCORES]
    seed: Annotated[
        int, Ge(0), Le(2**31 - 1), "Seed of initial weights, data order, noise and routes."
    ] = 0
    scale: Annotated[str, REPORTS] = "tiny"
    experiment: Annotated[str | None, REPORTS] = None
    size: Annotated[
        str, "Width, depth and patch: T, M, S, B, L or XL, a slash, the patch. Set by scale."
    ] = "T/1"
    route: Annotated[
        str,
        ROUTES,
        "Blocks that a random part of the tokens skips in training: none, 2-8, 2-8@0.75, auto, "
        "2--4, '0-4+6-9'.",
    ] = "none"
    task: Annotated[
        str, Choices(TASKS), "What the model is conditioned on: class, text or none."
    ] = "class"
    init: Annotated[
        str | None,
        "Start from the EMA weights of another run, with a fresh optimizer: RUN or RUN@STEP.",
    ] = None
    routing: Annotated[RoutingOptions, ROUTES] = field(default_factory=RoutingOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    log: Annotated[
        str, Choices(TRACKERS), REPORTS, "Experiment tracker, beside the files of the run folder."
    ] = "none"
    dry: Annotated[
        bool | Literal["full"],
        REPORTS,
        "Print model, cost, memory and run folder, check what the run would check, train nothing "
        "(also --dry-run). full: also build the model, name its kernels and time a step.",
    ] = False
    paths: Annotated[PathsOptions, REPORTS] = field(default_factory=PathsOptions)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """Build and check a configuration from plain values, as a run's `config.yaml` holds them.

        Raises:
            UserError: A key, a value or a combination that cannot be run.
        """
        if isinstance(values, Mapping):
            values = without_removed(values)
            # YAML reads an unquoted route or size as a list, as null or as a number.
            route = values.get("route", "none")
            if route is None or isinstance(route, list):
                values["route"] = "+".join(str(part) for part in route or ["none"])
            if isinstance(values.get("size"), int | float):
                values["size"] = str(values["size"])
        config: Config = validate(cls, values)
        # The route is typed at the top level; routing needs it beside its options.
        routing = dataclasses.replace(config.routing, route=config.route)
        config = dataclasses.replace(config, routing=routing)
        _check_groups(config)
        _check_combinations(config)
        return config

    def check_processes(self, count: int, on_gpu: bool) -> None:
        """Refuse what this number of processes, on GPUs or on CPUs, cannot do."""
        batch = self.train.batch
        if batch % count:
            raise ConfigError(f"train.batch={batch}: expected a multiple of the {count} processes")
        if self.train.graphs and not (on_gpu and count == 1):
            device = "a GPU" if on_gpu else "a CPU"
            raise ConfigError(
                f"train.graphs=true: expected one process on a GPU, there are {count} on {device}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return plain, JSON-able values; `Config.from_dict` inverts it."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @property
    def depth(self) -> int:
        """Number of blocks of the backbone."""
        return int(self.backbone.get("depth") or parse_size(self.size).depth)

    @property
    def resolved_route(self) -> str:
        """The route with absolute block indices, as in the run's name."""
        return str(RouteSchedule.parse(self.route).resolve(self.depth))

    def hashed(self) -> dict[str, Any]:
        """Return what the hash covers: all that decides what is learnt and how it is scored."""
        values = self.to_dict()
        steps = values["train"]["steps"]
        del values["routing"]["route"]
        values = _without_reports(values)
        values["route"] = self.resolved_route
        # These were hashed before they were found to change nothing: their former defaults keep
        # the names of older runs.
        values["train"].update(compile="none", tf32=True)
        if self._ends_with_its_schedule():
            values["train"]["steps"] = steps
        # Newer keys are left out at their default, for the same reason.
        newer = (
            ("guidance", "channels", None),
            ("data", "shape", None),
            ("train", "residual", "fp32"),
            ("train", "teacher_block", None),
            ("train", "teacher_offset", 0.2),
            ("train", "optimizer", "adamw"),
            ("train", "muon_lr", None),
            ("train", "muon_momentum", 0.95),
            ("backbone", "bottleneck", None),
            ("objective", "prediction", "v"),
            ("objective", "noise_scale", 1.0),
            ("objective", "clamp", 0.05),
        )
        for group, key, default in newer:
            if values[group].get(key) == default:
                values[group].pop(key, None)
        insert_removed(values)
        for key in location_keys(self.data["name"]):
            values["data"].pop(key, None)
        values["data_fingerprint"] = fingerprint(self.data)
        if self.init:
            values["init"] = parent_digest(self.init)
        if values["route"] == "none":
            # Two dense runs that differ in how tokens would be routed are one run.
            values.pop("routing")
        return values

    def _ends_with_its_schedule(self) -> bool:
        """Whether a schedule ends at the last step: another number of steps is another run."""
        routing = self.routing
        scheduled = routing.schedule != "constant" or routing.off_after < 1 or "/" in self.route
        return self.train.schedule != "constant" or (scheduled and self.resolved_route != "none")

    @property
    def hash(self) -> str:
        """First eight hexadecimal digits of the SHA-256 of `hashed()`."""
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


def role(key: str) -> str:
    """Return what a dotted key decides (`experiments.options.roles`); `learns` if undeclared."""
    name, _, rest = key.partition(".")
    if name not in {option.name for option in dataclasses.fields(Config)}:
        return LEARNS.name
    declared = role_of(Config, name)
    below = {"train": TrainOptions, "backbone": SharedBackboneOptions}.get(name)
    if declared is None and below is not None and rest:
        option = rest.partition(".")[0]
        if option in {field.name for field in dataclasses.fields(below)}:
            declared = role_of(below, option)
    return (declared or LEARNS).name


def _without_reports(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in values.items():
        if role(prefix + key) == REPORTS.name:
            continue
        kept[key] = (
            _without_reports(value, f"{prefix}{key}.") if isinstance(value, Mapping) else value
        )
    return kept


# --- what can be combined -------------------------------------------------------------------------


def _check_groups(config: Config) -> None:
    """Validate the options of every group."""
    for group in REQUIRED_GROUPS:
        if "name" not in getattr(config, group):
            raise ConfigError(f"missing key {group}.name: choose one with {group}=NAME")
    for key, value in flatten(config.to_dict()).items():
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ConfigError(f"{key}={value}: expected an integer below 2^63")
    _check_backbone(config)
    parse(config.data)
    parse_named(OBJECTIVES, "objective", config.objective)
    parse_named(SAMPLERS, "sampler", config.sampler)
    parse_named(GUIDANCE, "guidance", config.guidance)
    validate(EvalOptions, config.eval, "eval.")


def _check_backbone(config: Config) -> None:
    shared_names = {option.name for option in dataclasses.fields(SharedBackboneOptions)}
    shared, own = {}, {}
    for key, value in config.backbone.items():
        if key in shared_names:
            shared[key] = value
        elif key != "name" and value is not None:  # null leaves the choice to the family
            own[key] = value
    common = validate(SharedBackboneOptions, shared, "backbone.")
    size = parse_size(config.size, common.depth, common.width, common.heads)
    find(config.backbone["name"]).parse(size, own, shared_names)


def _check_combinations(config: Config) -> None:
    train = config.train
    for key, path in (("paths.runs", config.paths.runs), ("init", config.init)):
        if path is not None and not path.strip():
            raise ConfigError(f"{key}= is empty: expected a folder, such as runs or runs/NAME")
    if train.graphs and (train.micro_batch is not None or config.routing.random_end):
        raise ConfigError(
            "train.graphs=true records one step on a whole batch under a fixed route: expected "
            "train.micro_batch=null and routing.random_end=false"
        )
    if train.residual == "bf16" and train.precision == "fp32":
        raise ConfigError("train.residual=bf16: expected train.precision=bf16 or auto as well")
    _, height, width = describe(config.data)["shape"]
    patch = parse_size(config.size).patch
    model = f"{config.backbone['name']}-{config.size}"
    config.routing.check(config.depth, (height // patch, width // patch), model)
    if config.backbone.get("decoder") is not None and config.objective["name"] == "ddpm":
        raise ConfigError(
            "backbone.decoder with objective=ddpm: expected objective=edm or flow, since MaskDiT "
            "reconstructs the denoised image, which is unstable at DDPM's noisiest steps"
        )
    _check_alignment(config)


def _check_alignment(config: Config) -> None:
    """Refuse a projector or a teacher that does not fit the model or the encoder."""
    align, encoder = config.backbone.get("align"), config.train.encoder
    if config.train.teacher_block is not None:
        least = Annotated[int, Ge(0), Le(config.depth - 1)]
        validate_value(least, config.train.teacher_block, "train.teacher_block")
    if align is None:
        return
    if encoder == "none":
        raise ConfigError(
            f"backbone.align={align}: expected train.encoder to be one of "
            f"{', '.join((*ENCODERS, SELF_ENCODER))}"
        )
    block = align.get("block", AlignOptions.block)
    validate_value(Annotated[int, Ge(0), Le(config.depth - 1)], block, "backbone.align.block")
    channels = align.get("channels", AlignOptions.channels)
    expected = encoder_width(config)
    if channels != expected:
        raise ConfigError(
            f"backbone.align.channels={channels}: expected {expected}, the features of "
            f"train.encoder={encoder}"
        )


def encoder_width(config: Config) -> int:
    """Return the width of the features that `train.encoder` names."""
    if config.train.encoder == SELF_ENCODER:
        return int(config.backbone.get("width") or parse_size(config.size).width)
    return ENCODERS[config.train.encoder]
