"""TREAD's token routing: which blocks a token skips, which tokens skip, and where the rest sit.

No architecture and no training lives here. Importing the package imports no torch; a name is
loaded when it is first asked for, so that parsing a route costs milliseconds.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "attached.hooks": ("AttachError", "Attached", "attach"),
    "errors": ("UserError",),
    "layout": ("Layout", "LayoutError", "Order"),
    "learned": ("Fuse", "LearnedRouter"),
    "options": ("RoutingError", "RoutingOptions"),
    "rng": ("Draws",),
    "route": ("MODES", "Route", "RouteError", "Segment", "keep_count"),
    "schedule": ("RouteSchedule", "Schedule", "ScheduleError"),
    "selection": ("Selection", "SelectionError", "select"),
    "stack": ("Reuse", "Routing", "Stack", "StackOutput"),
}

__all__ = sorted(name for names in _HOME.values() for name in names)


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            return getattr(importlib.import_module(f"routing.{module}"), name)
    raise AttributeError(f"module 'routing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
