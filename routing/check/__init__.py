"""Is an implementation of token routing correct? A conformance kit for any model.

    def build(seed=0):
        ...                                   # a model with routing, seeded
        return routing.check.RoutedModel(
            blocks=model.blocks, train=..., evaluate=..., dense=..., route="2-8@0.5"
        )

    print(routing.check(build))               # or: python -m routing.check module:build

It runs the model with marked tokens (`routing.check.marks`), judges each property
(`routing.check.properties`, `routing.check.tables`, `routing.check.scans`) and returns a table with
evidence.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from routing.check.report import Finding, Report
from routing.check.runner import check
from routing.check.subject import CheckError, RoutedModel

__all__ = ["CheckError", "Finding", "Report", "RoutedModel", "check"]


class _Callable(types.ModuleType):
    """This module, which can be called itself: `routing.check(build)`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Report:
        """Run `check`."""
        return check(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
