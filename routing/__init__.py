"""TREAD's token routing: which blocks a token skips, which tokens skip, and where the rest sit.

No architecture and no training lives here. Importing the package imports no torch; a name is
loaded when it is first asked for, so that parsing a route costs milliseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from routing.attached.hooks import Attached, AttachError, attach
    from routing.errors import UserError
    from routing.layout import Layout, LayoutError, Order
    from routing.learned import Fuse, LearnedRouter
    from routing.options import RoutingError, RoutingOptions
    from routing.rng import Draws
    from routing.route import MODES, Route, RouteError, Segment, keep_count
    from routing.schedule import RouteSchedule, Schedule, ScheduleError
    from routing.selection import Selection, SelectionError, select
    from routing.stack import Reuse, Routing, Stack, StackOutput

_HOME = {
    "attach": "attached.hooks",
    "Attached": "attached.hooks",
    "AttachError": "attached.hooks",
    "UserError": "errors",
    "Route": "route",
    "RouteError": "route",
    "Segment": "route",
    "keep_count": "route",
    "Draws": "rng",
    "MODES": "route",
    "Selection": "selection",
    "SelectionError": "selection",
    "select": "selection",
    "Layout": "layout",
    "Order": "layout",
    "LayoutError": "layout",
    "Routing": "stack",
    "RoutingError": "options",
    "RoutingOptions": "options",
    "Schedule": "schedule",
    "RouteSchedule": "schedule",
    "ScheduleError": "schedule",
    "Reuse": "stack",
    "Fuse": "learned",
    "LearnedRouter": "learned",
    "Stack": "stack",
    "StackOutput": "stack",
}

__all__ = [
    "MODES",
    "AttachError",
    "Attached",
    "Draws",
    "Fuse",
    "Layout",
    "LayoutError",
    "LearnedRouter",
    "Order",
    "Reuse",
    "Route",
    "RouteError",
    "RouteSchedule",
    "Routing",
    "RoutingError",
    "RoutingOptions",
    "Schedule",
    "ScheduleError",
    "Segment",
    "Selection",
    "SelectionError",
    "Stack",
    "StackOutput",
    "UserError",
    "attach",
    "keep_count",
    "select",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(f"routing.{_HOME[name]}"), name)
    raise AttributeError(f"module 'routing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
