"""Builders of tables and figures by name; each module is imported when its builder is called."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Builder:
    """A function of `Results`, named as `package.module:function`."""

    target: str

    def __call__(self, results: Any) -> Any:
        """Import the function and call it."""
        module, _, function = self.target.partition(":")
        return getattr(importlib.import_module(module), function)(results)


def builders(package: str, targets: Mapping[str, str]) -> dict[str, Builder]:
    """Return builders by name.

    Args:
        package: Package of the modules.
        targets: `module:function` by name; the order is that of reports and of `make_all`.
    """
    return {name: Builder(f"{package}.{target}") for name, target in targets.items()}
