"""Names of the families and the one way to build a model (torch comes only with a model).

A family is one file of this package whose block class is decorated:

    @register("mamba")
    class MambaBlock(nn.Module): ...

`names()` reads the decorators without importing the files, so that a typo in `backbone=` is
answered at once; `create` imports the file it needs.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from backbones.sizes import BackboneError
from routing.errors import suggest

if TYPE_CHECKING:
    from backbones.backbone import Backbone

_BLOCKS: dict[str, Any] = {}
_DECORATOR = re.compile(r"^@register\(\"([a-z0-9_]+)\"\)", re.MULTILINE)

T = TypeVar("T", bound=type)


def register(name: str) -> Callable[[T], T]:
    """Decorate a block class as family `name`.

    The class has a dataclass `Options` (the family's options with their defaults) and is built as
    `Block(size, index, options)`; it is called as `block(x, cond, layout)` (see `routing.Stack`).

    Raises:
        BackboneError: The name belongs to another class already.
    """

    def add(cls: T) -> T:
        known = _BLOCKS.get(name)
        if known is not None and known.__qualname__ != cls.__qualname__:
            raise BackboneError(f"backbone {name!r} is registered already by {known.__module__}")
        _BLOCKS[name] = cls
        return cls

    return add


def _files() -> dict[str, str]:
    """Map every family name to the module that registers it, from the source text alone."""
    found, here = {}, Path(__file__).parent
    for path in sorted(here.rglob("*.py")):
        for name in _DECORATOR.findall(path.read_text(encoding="utf-8")):
            found[name] = ".".join(("backbones", *path.relative_to(here).with_suffix("").parts))
    return found


def names() -> list[str]:
    """Return the names of all families, sorted."""
    return sorted({*_files(), *_BLOCKS})


def block_class(name: str) -> Any:
    """Return the block class of a family.

    Raises:
        BackboneError: No such family; the message names the closest one.
    """
    if name not in _BLOCKS:
        module = _files().get(name)
        if module is None:
            known = names()
            raise BackboneError(
                f"backbone {name!r} is not known: backbones are {', '.join(known)}"
                + suggest(name, known)
            )
        importlib.import_module(module)
    return _BLOCKS[name]


def parse_options(name: str, given: dict[str, Any], known: tuple[str, ...] = ()) -> Any:
    """Build a family's `Options` from keyword arguments.

    Args:
        name: Family.
        given: Options as typed.
        known: Further names that the caller accepts, for the suggestion.

    Raises:
        BackboneError: An option that the family does not have, or a value it cannot take.
    """
    cls = block_class(name).Options
    fields = [f.name for f in dataclasses.fields(cls)]
    for key in given:
        if key not in fields:
            raise BackboneError(
                f"backbone {name} has no option {key!r}: its options are "
                f"{', '.join(fields) or 'none'}" + suggest(key, [*fields, *known])
            )
    return cls(**given)


def create(name: str, size: str = "S/2", **options: Any) -> Backbone:
    """Build a model.

    Args:
        name: Family, one of `names()`.
        size: Letter and patch, as "S/2" (`backbones.sizes.SIZES`).
        **options: Arguments of `backbones.backbone.Backbone` and the family's own options.

    Raises:
        BackboneError: Unknown name, size or option, or a value that does not fit.
    """
    block_class(name)
    from backbones.backbone import Backbone

    return Backbone(name, size, **options)


def check_choice(option: str, value: object, choices: tuple[Any, ...]) -> None:
    """Raise `BackboneError` unless `value` is one of `choices`."""
    if value not in choices:
        shown = ", ".join(str(c) for c in choices)
        raise BackboneError(
            f"{option}={value} is not known: take one of {shown}"
            + suggest(str(value), [str(c) for c in choices])
        )
