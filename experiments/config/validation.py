"""A configuration from plain values: types, ranges, and what each group's owner refuses (no torch).

Every mistake is one sentence that names the key, what was expected and what to type.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from backbones.head_options import AlignOptions
from backbones.registry import find
from backbones.sizes import parse_size
from experiments.data import data_options
from experiments.diffusion.diffusion_options import options_of
from experiments.metrics.eval_options import EvalOptions
from experiments.runtime.keys import ConfigError
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
        data_options.parse(config.data)
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
    _, height, width = data_options.describe(config.data)["shape"]
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
