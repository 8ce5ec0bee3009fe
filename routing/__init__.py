"""TREAD's token routing: which blocks a token skips, which tokens skip, and where the rest sit.

No architecture and no training lives here. Importing the package imports no torch; a name is
loaded when it is first asked for, so that parsing a route costs milliseconds.
"""

from routing.lazy import lazily

__getattr__, __dir__, __all__ = lazily(
    __name__,
    {
        "attached.hooks": ("AttachError", "Attached", "attach"),
        "check": ("check",),
        "errors": ("UserError",),
        "layout": ("Layout", "LayoutError", "Order"),
        "learned": ("Fuse",),
        "options": ("RoutingError", "RoutingOptions", "SelectionError"),
        "rng": ("Draws",),
        "route": ("MODES", "Route", "RouteError", "RouteSchedule", "Segment", "keep_count"),
        "routed_pass": ("Routing", "Selection", "select"),
        "schedule": ("Schedule", "ScheduleError"),
        "stack": ("Stack", "StackOutput"),
    },
)
