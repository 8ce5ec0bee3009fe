"""The families by name: their options, what their blocks cost, where those are (no torch here).

A family `NAME` is its block class in `NAME.py`, and what must be known before torch is imported in
`NAME_spec.py`, which ends in

    register(Spec("NAME", NAMEOptions, block_cost, "backbones.NAME:NAMEBlock"))

A family of somebody else's is one file anywhere that does both and ends in `register`; every
command knows it where the environment variable TREAD_BACKBONES names that file (several are joined
as in PATH). The files are code, so no configuration and no run folder can name them.
"""

import dataclasses
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from backbones.sizes import BackboneError, Size
from routing.errors import UserError, one_of, suggest


@dataclass(frozen=True)
class BlockCost:
    """Cost of one block.

    Linear layers are what torch's counter sees; scans, bi-WKV, convolutions and shifts are counted
    by hand, as recurrences: chunked algorithms do more products than that, and are faster all the
    same.

    Attributes:
        params: Parameters without the block's share of the modulation.
        linear: MACs of the linear layers per token.
        mixing: Function of the number of tokens: MACs of everything that mixes them, per sample.
        saved: Floats that training keeps for the backward pass, per token (measured, within 15 %).
    """

    params: int
    linear: int
    mixing: Callable[[int], int]
    saved: int


@dataclass(frozen=True)
class Spec:
    """A family without its implementation.

    Attributes:
        name: As in `backbone=`.
        options: Dataclass of its options and their defaults, which checks their values.
        cost: `cost(size, options, index)` counts block `index` of a stack.
        block: Where its class is, as "module:Class" (in a file of its own, f"{__name__}:Class"): a
            `backbones.layers.Block` that is built as `Class(size, index, grid, options)`.
        check: `check(size, options)` raises `BackboneError` where the two do not fit.
        weighted_norms: Normalise by RMSNorms with weights, the model's head too, and not by
            LayerNorms without.
    """

    name: str
    options: type
    cost: Callable[[Size, Any, int], BlockCost]
    block: str
    check: Callable[[Size, Any], None] | None = None
    weighted_norms: bool = False

    def parse(self, size: Size, given: Mapping[str, Any], known: Collection[str] = ()) -> Any:
        """Build the family's options for a stack of this size; arguments as in `build_options`."""
        what = f"backbone {self.name}"
        options = build_options(self.options, without_removed(given, what), what, known)
        if self.check is not None:
            self.check(size, options)
        return options


_SPECS: dict[str, Spec] = {}
OUTSIDE = "TREAD_BACKBONES"
# Former arguments of every model, with their defaults: weights files of earlier versions have them.
REMOVED = {"router": None}
# What `Backbone` and `cost` take for every family: they would keep a family's option of that name.
TAKEN = {
    "name", "size", "in_channels", "input_size", "num_classes", "text", "learn_sigma", "attention",
    "depth", "width", "heads", "fuse", "decoder", "align",
    "route", "reinsert", "remove", "bytes_per_value", *REMOVED,
}  # fmt: skip


def register(spec: Spec) -> None:
    """Add a family, of this package or of any other code.

    Raises:
        BackboneError: The name is another family's already, or that of an option the model's.
    """
    for field in dataclasses.fields(spec.options):
        if field.name in TAKEN:
            raise BackboneError(
                f"backbone {spec.name!r} has an option {field.name!r}, which is an argument of "
                "every model; rename it"
            )
    known = _SPECS.setdefault(spec.name, spec)
    if known.block != spec.block:
        raise BackboneError(f"backbone {spec.name!r} is registered already by {known.block}")


def _import_outside() -> None:
    """Import the files that TREAD_BACKBONES names; each registers its families."""
    for text in filter(None, os.environ.get(OUTSIDE, "").split(os.pathsep)):
        path = Path(text).expanduser().resolve()
        if path.suffix != ".py" or not path.is_file():
            raise BackboneError(
                f"{OUTSIDE}={text}: there is no such Python file; give the path of one that calls "
                "backbones.register"
            )
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        found = _import_file(path, f"{OUTSIDE}={text}").__file__
        if found is None or Path(found).resolve() != path:
            raise BackboneError(
                f"{OUTSIDE}={text}: Python has another module {path.stem!r} ({found}); rename the "
                "file"
            )


def _import_file(path: Path, setting: str) -> ModuleType:
    """Import a user's file; whatever it raises becomes one sentence with the file and line."""
    try:
        return importlib.import_module(path.stem)
    except BackboneError:  # `register` refused what the file gave it
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, SyntaxError):
            place, reason = f"{error.filename}, line {error.lineno}", f"{error.msg}"
        else:
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in frames if frame.filename == str(path)]
            place, reason = f"{path}, line {lines[-1]}" if lines else str(path), str(error)
        first_line = reason.strip().partition("\n")[0]
        raise BackboneError(
            f"{setting}: the file cannot be imported: {place}: {type(error).__name__}: "
            f"{first_line[:200]}"
        ) from None


def names() -> list[str]:
    """Return the names of all families, sorted.

    Raises:
        BackboneError: TREAD_BACKBONES names a file that cannot be imported.
    """
    here = Path(__file__).parent
    for path in here.glob("*_spec.py"):
        importlib.import_module(".".join(path.relative_to(here.parent).with_suffix("").parts))
    _import_outside()
    return sorted(_SPECS)


def find(name: str) -> Spec:
    """Return the spec of a family; the `BackboneError` for an unknown name says the closest one."""
    if name not in _SPECS and name not in (known := names()):
        raise BackboneError(
            f"backbone {name!r} is not known: backbones are {', '.join(known)}"
            f"{suggest(name, known)} (one of your own: {OUTSIDE}=FILE.py)"
        )
    return _SPECS[name]


def without_removed(given: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Leave out removed arguments that have their former default.

    Raises:
        BackboneError: A removed argument with another value.
    """
    for key, default in REMOVED.items():
        if given.get(key, default) != default:
            raise BackboneError(
                f"{what}: {key}={given[key]}: {key} was removed; only its former default "
                f"{key}={default} is accepted"
            )
    return {key: value for key, value in given.items() if key not in REMOVED}


def build_options(
    cls: type, given: Mapping[str, Any], what: str, known: Collection[str] = ()
) -> Any:
    """Build a dataclass of options from keyword arguments.

    In an error, `what` is their owner, and `known` further names that may have been meant.

    Raises:
        BackboneError: An unknown key, or a value that the class refuses.
    """
    fields = {field.name: field.type for field in dataclasses.fields(cls)}
    for key, value in given.items():
        if key not in fields:
            raise BackboneError(
                f"{what} has no option {key!r}: its options are {', '.join(fields) or 'none'}"
                + suggest(key, [*fields, *known])
            )
        # A word such as no would count as true.
        if fields[key] in (bool, "bool") and not isinstance(value, bool):
            raise BackboneError(f"{what}: {key}={value}: expected true or false")
    try:
        return cls(**given)
    except BackboneError as error:
        raise BackboneError(f"{what}: {error}") from None


# Kernels of each operation in the order in which `auto` prefers them; torch and the reference run
# everywhere. `native` is for CPUs (`backbones.ops.native`), the others need CUDA.
KERNELS = {
    "ssd": ("mamba-ssm", "fla", "native"),
    "selective_scan": ("mamba-ssm",),
    "biwkv": ("triton", "native"),
    "conv": ("causal-conv1d", "triton", "native"),
    "shift": ("native",),
    "rwkv7": ("fla",),
}


def check_kernel(requested: str, op: str, error: type[UserError] = BackboneError) -> None:
    """Raise `error` unless an operation has a kernel of that name, here or elsewhere."""
    known = ("auto", "torch", "reference", "kernel", *KERNELS[op])
    one_of("kernel", requested, known, error)


def check_choice(options: Any, name: str, *choices: str) -> None:
    """Raise `BackboneError` unless the option `name` is one of `choices`.

    YAML reads a bare true, off or no as a truth value: it becomes the word again.
    """
    value = getattr(options, name)
    if isinstance(value, bool):
        words = ("true",) if value else ("off", "none")
        value = next((word for word in words if word in choices), str(value))
        object.__setattr__(options, name, value)
    one_of(name, value, choices, BackboneError)
