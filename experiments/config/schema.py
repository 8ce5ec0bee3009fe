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
from typing import Annotated, Any

from backbones.registry import find
from backbones.sizes import AlignOptions, parse_size
from experiments.config.parent import parent_digest
from experiments.config.removed_keys import insert_removed, without_removed
from experiments.data.data_options import TASKS, describe, fingerprint, parse, places
from experiments.options.diffusion import options_of
from experiments.options.evaluation import EvalOptions
from experiments.options.fields import ConfigError, Key, build, flatten, keys_of
from routing.errors import UserError
from routing.options import RoutingOptions
from routing.route import RouteError
from routing.schedule import RouteSchedule

# Frozen encoders that REPA can align to, and the width of their features (`training.loss`).
ENCODERS = {
    "random": 64, "probe": 96,
    "dinov2-vits14": 384, "dinov2-vitb14": 768, "dinov2-vitl14": 1024,
}  # fmt: skip
# The keys that every backbone has, and their defaults.
SHARED: dict[str, Any] = {"attention": 0} | dict.fromkeys(
    ("depth", "width", "heads", "decoder", "align")
)
CONF = Path(__file__).resolve().parents[1] / "conf"
GROUPS = ("backbone", "data", "objective", "sampler", "guidance", "eval", "scale", "experiment")

ROLES = ("learns", "routes", "scores", "reports")
TRACKERS = ("none", "tensorboard", "wandb", "trackio")
# The OpenMP runtime ends the process where it cannot start as many as it is asked for.
MOST_THREADS = 1024
# Samples are counted in 64 bits: batch times steps must fit, with room.
MOST_COUNTED = 10**9


@dataclass(frozen=True)
class TrainConfig:
    """Optimisation and bookkeeping of one run (TREAD: AdamW 1e-4, batch 256, EMA 0.9999)."""

    steps: Annotated[int, Key("reports", least=1, most=MOST_COUNTED)] = 1000
    batch: Annotated[int, Key(least=1, most=MOST_COUNTED)] = 64
    micro_batch: Annotated[int | str | None, Key("reports", least=1, among=("auto",))] = None
    lr: Annotated[float, Key(above=0)] = 1e-4
    warmup: Annotated[int, Key(least=0)] = 0
    schedule: Annotated[str, Key(among=("constant", "cosine"))] = "constant"
    betas: Annotated[tuple[float, float], Key(least=0, below=1)] = (0.9, 0.999)
    eps: Annotated[float, Key(above=0)] = 1e-8
    weight_decay: Annotated[float, Key(least=0)] = 0.0
    clip: Annotated[float | None, Key(above=0)] = None
    ema: Annotated[float, Key(least=0, below=1)] = 0.9999
    label_drop: Annotated[float, Key(least=0, most=1)] = 0.1
    precision: Annotated[str, Key(among=("fp32", "bf16", "auto"))] = "fp32"
    residual: Annotated[str, Key(among=("fp32", "bf16"))] = "fp32"
    tf32: Annotated[bool, Key("reports")] = True
    threads: Annotated[int | None, Key("reports", least=1, most=MOST_THREADS)] = None
    compile: Annotated[str, Key("reports", among=("none", "blocks"))] = "none"
    graphs: Annotated[bool, Key("reports")] = False
    log_every: Annotated[int, Key("reports", least=1)] = 10
    save_every: Annotated[int, Key("reports", least=1)] = 200
    keep: Annotated[int, Key("reports", least=1)] = 2
    keep_every: Annotated[int, Key("reports", least=0)] = 0
    sample_every: Annotated[int, Key("reports", least=0)] = 0
    max_bad_steps: Annotated[int, Key("reports", least=0)] = 20
    rollback: Annotated[int, Key("reports", least=0)] = 0
    loss: Annotated[str, Key("routes", among=("plain", "ensemble"))] = "plain"
    mae_weight: Annotated[float, Key("routes", least=0)] = 0.1
    encoder: Annotated[str, Key("routes", among=("none", *ENCODERS))] = "none"
    align_weight: Annotated[float, Key("routes", least=0)] = 0.5


@dataclass(frozen=True)
class PathsConfig:
    """Folders a run reads and writes."""

    runs: str = "runs"
    cache: str | None = None


@dataclass(frozen=True)
class Config:
    """One run; groups with options of their own stay mappings, which their owners type."""

    seed: Annotated[int, Key(least=0, most=2**31 - 1)]
    scale: Annotated[str, Key("reports")]
    size: str
    route: Annotated[str, Key("routes")]
    task: Annotated[str, Key(among=TASKS)]
    backbone: Annotated[dict[str, Any], Key(parts={"decoder": "routes", "align": "routes"})]
    data: dict[str, Any]
    objective: dict[str, Any]
    sampler: Annotated[dict[str, Any], Key("scores")]
    guidance: Annotated[dict[str, Any], Key("scores")]
    eval: Annotated[dict[str, Any], Key("scores")]
    routing: Annotated[RoutingOptions, Key("routes")] = field(default_factory=RoutingOptions)
    train: TrainConfig = field(default_factory=TrainConfig)
    paths: Annotated[PathsConfig, Key("reports")] = field(default_factory=PathsConfig)
    init: str | None = None
    log: Annotated[str, Key("reports", among=TRACKERS)] = "none"
    dry: Annotated[bool | str, Key("reports", among=("full",))] = False
    experiment: Annotated[str | None, Key("reports")] = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """Build and check a configuration from plain values, as `config.yaml` holds them."""
        if isinstance(values, Mapping):
            values = without_removed(values)
            _check_counted(values)
            # What YAML takes for a list, for nothing or for a number.
            route, size = values.get("route", ""), values.get("size")
            if route is None or isinstance(route, list):
                values = {**values, "route": "none" if route is None else "+".join(map(str, route))}
            if isinstance(size, int | float):
                values = {**values, "size": str(size)}
        config = build(cls, values)
        # The route is typed at the top (route=2-8); the routing options carry it to where it acts.
        routing = dataclasses.replace(config.routing, route=config.route)
        config = dataclasses.replace(config, routing=routing)
        config.check()
        return config

    def check(self) -> None:
        """Refuse what cannot be run, with one sentence (ranges, names, route against depth)."""
        train = self.train
        for key, path in (("paths.runs", self.paths.runs), ("init", self.init)):
            if path is not None and not path.strip():
                raise ConfigError(f"{key}= is empty: expected a folder, such as runs or runs/NAME")
        if train.graphs and (train.micro_batch is not None or self.routing.random_end):
            raise ConfigError(
                "train.graphs=true: a CUDA graph holds one step on a whole batch under a fixed "
                "route; type train.micro_batch=null routing.random_end=false, or train.graphs=false"
            )
        if train.residual == "bf16" and train.precision != "bf16":
            raise ConfigError(
                f"train.residual=bf16 with train.precision={train.precision}: the residual stream "
                "has the weights' type without autocast; type train.precision=bf16 as well"
            )
        for group in GROUPS[:6]:
            if "name" not in getattr(self, group):
                raise ConfigError(f"missing key {group}.name: choose one with {group}=NAME")
        check_groups(self)

    def check_processes(self, count: int, on_gpu: bool) -> None:
        """Refuse what so many processes, on GPUs or on CPUs, cannot do."""
        batch = self.train.batch
        if batch % count:
            raise ConfigError(
                f"train.batch={batch} cannot be split over {count} processes: "
                f"try train.batch={max(1, round(batch / count)) * count}"
            )
        if self.train.graphs and not (on_gpu and count == 1):
            raise ConfigError(
                f"train.graphs=true: CUDA graphs need one process on a GPU, and here are {count} "
                f"on {'cuda' if on_gpu else 'cpu'}; type train.graphs=false"
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
        """The route with absolute block numbers, as it names the run."""
        return str(RouteSchedule.parse(self.route).resolve(self.depth))

    def hashed(self) -> dict[str, Any]:
        """What the hash is taken of: all that decides what is learnt and how it is scored."""
        values = self.to_dict()
        values["route"] = self.resolved_route
        del values["routing"]["route"]
        # With a schedule that ends at the last step, another number of steps is another run.
        routing = self.routing
        staged = routing.schedule != "constant" or routing.off_after < 1 or "/" in self.route
        routed = self.resolved_route != "none"
        keep_steps = self.train.schedule != "constant" or (routed and staged)
        steps = values["train"]["steps"]
        values = _without(values, "reports")
        # Hashed until they were found to be reports: their defaults keep the names of older runs.
        values["train"].update(compile="none", tf32=True)
        if keep_steps:
            values["train"]["steps"] = steps
        late = (("guidance", "channels", None), ("data", "shape", None))
        for group, key, unset in (*late, ("train", "residual", TrainConfig.residual)):
            # Not set, they leave runs that are older than these keys their names.
            if values[group].get(key) == unset:
                values[group].pop(key, None)
        insert_removed(values)
        for key in places(self.data["name"]):
            values["data"].pop(key, None)
        values["data_fingerprint"] = fingerprint(self.data)
        if self.init:
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


def _check_counted(values: Mapping[str, Any]) -> None:
    """Refuse whole numbers that no counter and no tensor holds, wherever they stand."""
    for key, value in flatten(values).items():
        for item in value if isinstance(value, list | tuple) else [value]:
            if isinstance(item, int) and abs(item) >= 2**63:
                raise ConfigError(f"{key}={item}: expected a number below 2^63")


def role(key: str) -> str:
    """Return the role of a dotted key or group (`train.lr`); what no class declares is learnt."""
    found, cls, parts = "learns", Config, dict[str, str]()
    for name in key.split("."):
        known = keys_of(cls) if dataclasses.is_dataclass(cls) else {}
        if name not in known:
            return parts.get(name, found)
        cls, declared = known[name]
        # What a group is, its keys are, unless they say otherwise.
        found = declared.role if declared.role != "learns" else found
        parts = dict(declared.parts)
    return found


def _without(values: Mapping[str, Any], out: str, prefix: str = "") -> dict[str, Any]:
    """Leave out the keys of one role."""
    kept = {}
    for key, value in values.items():
        if role(prefix + key) != out:
            inner = isinstance(value, Mapping)
            kept[key] = _without(value, out, f"{prefix}{key}.") if inner else value
    return kept


# --- what each group's owner refuses --------------------------------------------------------------


def check_groups(config: Config) -> None:
    """Check every group's options with its owner, and the combinations between groups."""
    backbone = config.backbone
    for key in ("depth", "width", "heads"):
        Key().check(f"backbone.{key}", backbone.get(key), UserError, int | None)
    for key in ("decoder", "align"):
        Key().check(f"backbone.{key}", backbone.get(key), UserError, dict[str, Any] | None)
    size = parse_size(config.size, *(backbone.get(key) for key in ("depth", "width", "heads")))
    common = ("name", *SHARED)
    own = {k: v for k, v in backbone.items() if k not in common and v is not None}
    try:
        find(backbone["name"]).parse(size, own, common)
        parse(config.data)
        for kind in ("objective", "sampler", "guidance"):
            options_of(kind, getattr(config, kind))
        EvalOptions(**{k: v for k, v in config.eval.items() if k != "name"})
    except UserError:
        raise
    except (TypeError, ValueError, OverflowError, KeyError, AttributeError) as error:
        # What a value of the wrong type makes a range check trip over.
        raise UserError(
            f"a key or a value of the wrong type ({error}); python experiments/run.py --help all "
            "lists every key with its default"
        ) from None
    _check_routing(config)


def _check_routing(config: Config) -> None:
    """Refuse routes and routing options that the model cannot have."""
    _, height, width = describe(config.data)["shape"]
    patch = parse_size(config.size).patch
    name = f"{config.backbone['name']}-{config.size}"
    config.routing.check(config.depth, (height // patch, width // patch), name)
    if config.backbone.get("decoder") is not None and config.objective["name"] == "ddpm":
        raise RouteError(
            "backbone.decoder with objective=ddpm: MaskDiT's reconstruction is of the denoised "
            "image, where the noisiest steps enlarge an error 157 times; type objective=edm"
        )
    given, encoder = config.backbone.get("align"), config.train.encoder
    if given is None:
        return
    if encoder == "none":
        raise RouteError(
            "backbone.align projects to an encoder's features and train.encoder=none has none; "
            f"name one of {' '.join(ENCODERS)}"
        )
    block = given.get("block", AlignOptions.block)
    Key(least=0, below=config.depth).check("backbone.align.block", block, RouteError, int)
    channels = given.get("channels", AlignOptions.channels)
    if channels != ENCODERS[encoder]:
        raise RouteError(
            f"backbone.align.channels={channels}: {encoder} has {ENCODERS[encoder]} features"
        )
