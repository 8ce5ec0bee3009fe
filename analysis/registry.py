"""Builders of tables and figures by name; each module is imported when its builder is called."""

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any


def _build(target: str, results: Any) -> Any:
    """Import a function of `Results`, named as `package.module:function`, and call it."""
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)(results)


def builders(package: str, targets: Mapping[str, str]) -> dict[str, Callable[[Any], Any]]:
    """Return builders by name.

    Args:
        package: Package of the modules.
        targets: `module:function` by name; the order is that of reports and of `make_all`.
    """
    return {name: partial(_build, f"{package}.{target}") for name, target in targets.items()}
