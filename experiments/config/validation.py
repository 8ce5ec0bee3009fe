"""A configuration from plain values: types, ranges, and what each group's owner refuses (no torch).

Every mistake is one sentence that names the key, what was expected and what to type.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from backbones.head_options import AlignOptions
from backbones.registry import find
from backbones.sizes import parse_size
from experiments.data import specs
from experiments.diffusion.diffusion_options import options_of
from experiments.metrics.eval_options import EvalOptions
from routing.errors import UserError, suggest
from routing.route import RouteError

# Frozen encoders that REPA can align to, and the width of their features (`alignment.py`).
ENCODERS = {
    "random": 64, "probe": 96,
    "dinov2-vits14": 384, "dinov2-vitb14": 768, "dinov2-vitl14": 1024,
}  # fmt: skip
# The keys that every backbone has, and their defaults.
SHARED: dict[str, Any] = {"attention": 0} | dict.fromkeys(
    ("depth", "width", "heads", "decoder", "align")
)


@dataclass(frozen=True)
class Key:
    """What is declared of a configuration key beside its type, as `Annotated[int, Key(...)]`.

    Attributes:
        role: What the key decides, one of

            learns   what is learnt: other values are another experiment
            routes   what is done to the tokens while training: the treatment that tables compare
            scores   how samples are made and measured
            reports  where and how a run computes and what it leaves on disk: the same run

            Hash, grouping of runs, budgets and display names follow from it.
        least: Smallest value.
        above: All values are larger.
        most: Largest value.
        below: All values are smaller.
        among: The words it may be.
        parts: Roles of keys below it that have another one.
    """

    role: str = "learns"
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    among: tuple[str, ...] = ()
    parts: Mapping[str, str] = field(default_factory=dict)

    def check(self, name: str, value: Any) -> None:
        """Refuse a value out of range; null is in every range."""
        if self.among and value not in self.among:
            raise ConfigError(
                f"{name}={value}: expected one of {' '.join(self.among)}"
                f"{suggest(str(value), self.among)}"
            )
        if value is None or isinstance(value, str):
            return
        least, most = self.least, self.most
        good = (
            (least is None or value >= least)
            and (self.above is None or value > self.above)
            and (most is None or value <= most)
            and (self.below is None or value < self.below)
        )
        bounded = (least, self.above, most, self.below) != (None,) * 4
        if good and not (bounded and isinstance(value, float) and not math.isfinite(value)):
            return
        if least == 0 and 1 in (most, self.below):
            expected = "a share between 0 and 1" + (", below 1" if self.below == 1 else "")
        elif self.above is not None:
            expected = f"a number above {self.above:g}"
        else:
            expected = f"a number of at least {least:g}"
            if most is not None and value > least:
                expected = f"at most {int(most):,}".replace(",", " ")
        raise ConfigError(f"{name}={value}: expected {expected}")


@functools.cache
def keys_of(cls: Any) -> dict[str, tuple[Any, Key]]:
    """Return the type and the `Key` of every field of a configuration class."""
    found = {}
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        declared = next((k for k in getattr(hint, "__metadata__", ()) if isinstance(k, Key)), None)
        plain = typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint
        found[name] = (plain, declared or Key())
    return found


def check_ranges(config: Any, where: str = "") -> None:
    """Refuse values out of the ranges that their keys declare, nested dataclasses included."""
    for name, (kind, key) in keys_of(config.__class__).items():
        value = getattr(config, name)
        if dataclasses.is_dataclass(kind):
            check_ranges(value, f"{where}{name}.")
        else:
            key.check(where + name, value)


class ConfigError(UserError):
    """A key, a value or a combination that cannot be run."""


def build(cls: type, values: Any, where: str = "") -> Any:
    """Make a dataclass from a mapping; refuse unknown keys and wrong types by name."""
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{where.rstrip('.') or 'the config'} must be a mapping of keys, got {values!r}"
        )
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    for key in values:
        if key not in names:
            raise ConfigError(f"unknown key {where}{key}{suggest(str(key), names)}")
    for f in dataclasses.fields(cls):
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and f.name not in values:
            raise ConfigError(f"missing key {where}{f.name}")
    return cls(
        **{key: _convert(hints[key], value, where + str(key)) for key, value in values.items()}
    )


def _convert(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, where + ".")
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        for option in typing.get_args(hint):
            try:
                return _convert(option, value, where)
            except ConfigError:
                continue
    elif hint is type(None):
        if value is None:
            return None
    elif origin is tuple:
        if isinstance(value, (list, tuple)):
            return tuple(_convert(typing.get_args(hint)[0], item, where) for item in value)
    elif origin is dict or hint is dict:
        if isinstance(value, Mapping):
            return dict(value)
    elif hint is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    elif hint is str:
        if isinstance(value, str) or (where == "route" and isinstance(value, list)):
            return value if isinstance(value, str) else "+".join(map(str, value))
        if where == "route" and value is None:
            return "none"
        if where == "size" and isinstance(value, (int, float)):
            return str(value)
    elif hint is Any or (type(value) is hint):
        return value
    if hint is int and isinstance(value, float) and value.is_integer():
        raise ConfigError(f"{where}={value!r}: expected a whole number; type {where}={int(value)}")
    raise ConfigError(f"{where}={value!r}: expected {_type_name(hint)}, got {type(value).__name__}")


def _type_name(hint: Any) -> str:
    names = {
        int: "a whole number",
        float: "a number",
        str: "a word",
        bool: "true or false",
        type(None): "null",
    }
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_type_name(option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return "a list such as [0.9,0.999]"
    return names.get(hint, str(hint))


def check_groups(config: Any) -> None:
    """Check every group's options with its owner, and the combinations between groups."""
    family = find(config.backbone["name"])
    shape = {key: config.backbone.get(key) for key in ("depth", "width", "heads")}
    for key, value in shape.items():
        if value is not None and type(value) is not int:
            raise UserError(f"backbone.{key}={value!r}: expected a whole number or null")
    size = parse_size(config.size, **shape)
    common = ("name", *SHARED)
    own = {k: v for k, v in config.backbone.items() if k not in common and v is not None}
    with _naming("backbone"):
        family.parse(size, own, common)
    for key in ("decoder", "align"):
        value = config.backbone.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise UserError(f"backbone.{key}={value!r}: expected null or a mapping such as {{}}")
    with _naming("data"):
        specs.parse(config.data)
    _check_routing(config)
    for kind in ("objective", "sampler", "guidance"):
        with _naming(kind):
            options_of(kind, getattr(config, kind))
    with _naming("eval"):
        EvalOptions(**{k: v for k, v in config.eval.items() if k != "name"})


@contextlib.contextmanager
def _naming(group: str) -> Iterator[None]:
    """Turn what a value of the wrong type makes a range check trip over into one sentence."""
    try:
        yield
    except UserError:
        raise
    except (TypeError, ValueError, OverflowError, KeyError, AttributeError) as error:
        raise UserError(
            f"{group}: a key or a value of the wrong type ({error}); "
            "python experiments/run.py --help all lists every key with its default"
        ) from None


def _check_routing(config: Any) -> None:
    """Refuse routes and routing options that the model cannot have."""
    _, height, width = specs.describe(config.data)["shape"]
    patch = parse_size(config.size).patch
    name = f"{config.backbone['name']}-{config.size}"
    config.routing.check(config.depth, (height // patch, width // patch), name)
    if config.backbone.get("decoder") and config.objective["name"] == "ddpm":
        raise RouteError(
            "backbone.decoder with objective=ddpm: MaskDiT's reconstruction is of the denoised "
            "image, where the noisiest steps enlarge an error 157 times; type objective=edm"
        )
    _check_align(config)


def _check_align(config: Any) -> None:
    given, encoder = config.backbone.get("align"), config.train.encoder
    if not given:
        return
    if encoder == "none":
        raise RouteError(
            "backbone.align projects to an encoder's features and train.encoder=none has none; "
            f"name one of {' '.join(ENCODERS)}"
        )
    channels = given.get("channels", AlignOptions.channels)
    if channels != ENCODERS[encoder]:
        raise RouteError(
            f"backbone.align.channels={channels}: {encoder} has {ENCODERS[encoder]} features"
        )
