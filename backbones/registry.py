"""The families by name (no torch here).

An external family is one Python file with a dataclass of options, a function that counts the cost
of a block, the block class, and at its end

    register(Spec("NAME", NAMEOptions, block_cost, f"{__name__}:NAMEBlock"))

Every command finds it if the environment variable TREAD_BACKBONES names that file (several are
separated as in PATH). Since the files are executed, no configuration or run folder can name them.
"""

import dataclasses
import importlib
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from backbones.options import FAMILIES, BlockCost, ModelConfig, Spec
from backbones.options.model import REMOVED, without_removed
from backbones.sizes import SIZES, BackboneError, Size, build_options, parse_size, patch_grid
from backbones.validation import OptionError, fields_of, validate_value
from routing.errors import require, suggest

__all__ = ["BlockCost", "Spec", "build_options", "find", "model_config", "names", "register"]

OUTSIDE = "TREAD_BACKBONES"
MODEL_ARGUMENTS = tuple(field.name for field in dataclasses.fields(ModelConfig)[:-1])
COST_ARGUMENTS = ("route", "reinsert", "remove", "bytes_per_value")
# Arguments of `backbones.create` and `cost` for every family: no option may have their names.
TAKEN = {*MODEL_ARGUMENTS, *COST_ARGUMENTS, *REMOVED, "options"}
_SPECS: dict[str, Spec] = {spec.name: spec for spec in FAMILIES}


def register(spec: Spec) -> None:
    """Add a family from code outside this package.

    Raises:
        BackboneError: Another family has the name, or an option the name of a model argument.
    """
    for field in dataclasses.fields(spec.options):
        require(
            field.name not in TAKEN,
            f"backbone {spec.name!r} has an option {field.name!r}, which is an argument of "
            "every model; rename it",
            BackboneError,
        )
    registered = _SPECS.setdefault(spec.name, spec)
    require(
        registered.block == spec.block,
        f"backbone {spec.name!r} is registered already by {registered.block}",
        BackboneError,
    )


def names() -> list[str]:
    """Return the names of all families, sorted.

    Raises:
        BackboneError: TREAD_BACKBONES names a file that cannot be imported.
    """
    _import_outside()
    return sorted(_SPECS)


def find(name: str) -> Spec:
    """Return a family.

    Raises:
        BackboneError: There is none of that name; the message suggests the closest one.
    """
    if name not in _SPECS:
        families = names()
        require(
            name in families,
            f"backbone {name!r} is not known: backbones are {', '.join(families)}"
            f"{suggest(name, families)} (one of your own: {OUTSIDE}=FILE.py)",
            BackboneError,
        )
    return _SPECS[name]


def model_config(name: str, size: str | Size = "S/2", **arguments: Any) -> ModelConfig:
    """Check the arguments of a model and fill in every default.

    Args:
        name: Family.
        size: Letter and patch, as in "S/2", or a shape.
        **arguments: Those of `ModelConfig`, and the family's options.

    Raises:
        BackboneError: Unknown family, size or option, or values that do not fit.
    """
    family = find(name)
    arguments = without_removed(arguments, f"backbone {name}")
    model: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for key, value in arguments.items():
        (model if key in MODEL_ARGUMENTS else options)[key] = value
    model = _validated({**model, "text": model.get("text") or None})
    shape = parse_size(size, model.get("depth"), model.get("width"), model.get("heads"))
    # A `Size` that is not in the table is described by depth, width and heads.
    is_custom = isinstance(size, Size) and size.name not in SIZES
    model["size"] = f"S/{shape.patch}" if is_custom else str(size)
    model |= _validated({"depth": shape.depth, "width": shape.width, "heads": shape.heads})
    grid = patch_grid(model.get("input_size", ModelConfig.input_size), shape.patch)
    model["input_size"] = [side * shape.patch for side in grid]
    family_options = family.parse(shape, grid, options, MODEL_ARGUMENTS)
    config = ModelConfig(name, **model, options=dataclasses.asdict(family_options))
    _check_combinations(config, family.branches(family_options))
    return config


def _validated(values: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of `ModelConfig` with the declared types, within the declared ranges."""
    fields = fields_of(ModelConfig)
    try:
        return {key: validate_value(fields[key].annotation, values[key], key) for key in values}
    except OptionError as error:
        raise BackboneError(str(error)) from None


def branches(config: ModelConfig) -> int:
    """Return the number of residual branches of a block."""
    family = find(config.name)
    return family.branches(family.parse(config.shape, config.grid, config.options))


def _check_combinations(config: ModelConfig, branches: int) -> None:
    """Raise `BackboneError` for arguments that exclude each other."""
    require(
        not (config.skips and config.fuse),
        "skips=true: expected false with SPRINT's fusion, which leaves out the blocks that "
        "long skips would join",
        BackboneError,
    )
    _check_context(config)
    require(
        not config.attention_blocks or branches == 2,
        f"attention={config.attention}: expected 0 for blocks of {branches} branch, since an "
        "attention block has two",
        BackboneError,
    )


def _check_context(config: ModelConfig) -> None:
    """Raise `BackboneError` if the model cannot have these class tokens."""
    count, start, depth = config.context_tokens, config.context_start, config.shape.depth
    require(
        count > 0 or start is None,
        f"context_start={start}: expected null without context_tokens",
        BackboneError,
    )
    if not count:
        return
    reason = ""
    if not config.num_classes:
        reason = "in a model without classes"
    elif config.skips:
        reason = "with skips=true, which joins blocks before and after they come in"
    elif find(config.name).carries:
        reason = f"for {config.name}, whose blocks hand per-token tensors on"
    require(not reason, f"context_tokens={count}: expected 0 {reason}", BackboneError)
    require(
        start is None or start < depth,
        f"context_start={start}: expected a block, 0 to {depth - 1}, or null",
        BackboneError,
    )


def _import_outside() -> None:
    """Import the files that TREAD_BACKBONES names; each registers its families."""
    for text in filter(None, os.environ.get(OUTSIDE, "").split(os.pathsep)):
        path = Path(text).expanduser().resolve()
        require(
            path.suffix == ".py" and path.is_file(),
            f"{OUTSIDE}={text}: there is no such Python file; give the path of one that calls "
            "backbones.register",
            BackboneError,
        )
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        module_file = _import_file(path, f"{OUTSIDE}={text}").__file__
        require(
            module_file is not None and Path(module_file).resolve() == path,
            f"{OUTSIDE}={text}: Python has another module {path.stem!r} ({module_file}); "
            "rename the file",
            BackboneError,
        )


def _import_file(path: Path, setting: str) -> ModuleType:
    """Import a user's file; an exception becomes one sentence with the file and line."""
    try:
        return importlib.import_module(path.stem)
    except BackboneError:  # `register` refused what the file gave it
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, SyntaxError):
            location, reason = f"{error.filename}, line {error.lineno}", f"{error.msg}"
        else:
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in frames if frame.filename == str(path)]
            location, reason = f"{path}, line {lines[-1]}" if lines else str(path), str(error)
        first_line = reason.strip().partition("\n")[0]
        raise BackboneError(
            f"{setting}: the file cannot be imported: {location}: {type(error).__name__}: "
            f"{first_line[:200]}"
        ) from None
