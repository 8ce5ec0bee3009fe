"""How a route changes over a run (no torch here).

A `RouteSchedule` names a route from each given progress on, `2-8/0.5:4-8/0.9:none`; a run that ends
densely is `2-8/0.9:none`. Progress is 0 at the first step and below 1 at the last. A `Schedule` is
a factor over progress, by which the route's rate is multiplied:

    constant          constant:0.5         the same throughout
    linear:1:0        linear:0:1:0.2       from one factor to another, here over the first fifth
    cosine:1:0        cosine:0:1:0.2       the same along half a cosine
    steps:1@0+0.5@0.6                      a factor from each given progress on
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from routing.errors import UserError, suggest
from routing.route import Route

KINDS = ("constant", "linear", "cosine", "steps")
_FACTORS = "constant, linear:1:0, cosine:1:0:0.5 or steps:1@0+0.5@0.6"


class ScheduleError(UserError):
    """A schedule that cannot be read or leaves its range."""


def _ascends(starts: list[float]) -> bool:
    """Whether values of progress ascend strictly and end at 1 or before."""
    return sorted(set(starts)) == starts and starts[-1] <= 1


@dataclass(frozen=True)
class Schedule:
    """A factor over progress.

    Args:
        kind: One of `KINDS`.
        points: Pairs (progress, factor), progress ascending from 0: one for `constant`, two for
            `linear` and `cosine` (the second is where the change is complete), any for `steps`.

    Raises:
        ScheduleError: If the kind is unknown, a factor is negative, or progress leaves 0..1.
    """

    kind: str = "constant"
    points: tuple[tuple[float, float], ...] = ((0.0, 1.0),)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ScheduleError(
                f"schedule {self.kind}: expected {_FACTORS}{suggest(self.kind, KINDS)}"
            )
        count = {"constant": 1, "linear": 2, "cosine": 2}.get(self.kind, len(self.points))
        starts = [point[0] for point in self.points]
        factors = [point[1] for point in self.points]
        if len(starts) != count or not starts or starts[0] != 0:
            raise ScheduleError(f"schedule {self.kind}: begins at progress 0; expected {_FACTORS}")
        if not _ascends(starts):
            raise ScheduleError(f"schedule {self}: progress must ascend from 0 to at most 1")
        if not all(0 <= factor < math.inf for factor in factors):
            raise ScheduleError(f"schedule {self}: a factor is 0 or more; try linear:1:0")

    @classmethod
    def parse(cls, text: str | Schedule) -> Schedule:
        """Read a schedule as in the module's examples, or raise a `ScheduleError`."""
        if isinstance(text, Schedule):
            return text
        kind, _, arguments = str(text).strip().partition(":")
        items = [item for item in arguments.split("+" if kind == "steps" else ":") if item]
        try:
            if kind == "steps":
                points = []
                for item in items:
                    factor, progress = item.split("@")
                    points.append((float(progress), float(factor)))
                return cls(kind, tuple(points))
            numbers = [float(item) for item in items]
        except ValueError as error:
            if isinstance(error, UserError):
                raise
            raise ScheduleError(f"schedule {text}: expected {_FACTORS}") from None
        if kind in ("linear", "cosine") and len(numbers) in (0, 2, 3):
            first, last, until = (*(numbers or (1.0, 0.0)), 1.0)[:3]
            return cls(kind, ((0.0, first), (until, last)))
        if kind == "constant" and len(numbers) < 2:
            return cls(kind, ((0.0, numbers[0] if numbers else 1.0),))
        raise ScheduleError(f"schedule {text}: expected {_FACTORS}{suggest(kind, KINDS)}")

    def at(self, progress: float) -> float:
        """Return the factor at `progress`, the fraction of the run that is done (0..1)."""
        if self.kind in ("constant", "steps"):
            return [factor for start, factor in self.points if start <= max(progress, 0.0)][-1]
        (_, first), (until, last) = self.points
        share = min(max(progress / until, 0.0), 1.0)
        if self.kind == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        return first + share * (last - first)

    @property
    def largest(self) -> float:
        """The largest factor it reaches."""
        return max(factor for _, factor in self.points)

    def __str__(self) -> str:
        if self.kind == "steps":
            return "steps:" + "+".join(
                f"{_format(value)}@{_format(at)}" for at, value in self.points
            )
        if self.kind == "constant":
            value = self.points[0][1]
            return "constant" if value == 1 else f"constant:{_format(value)}"
        (_, first), (until, last) = self.points
        return f"{self.kind}:{_format(first)}:{_format(last)}" + (
            "" if until == 1 else f":{_format(until)}"
        )


@dataclass(frozen=True)
class RouteSchedule:
    """The route at each progress, and the factor of its rate.

    Args:
        stages: Pairs (progress, route), progress ascending from 0.
        factor: Multiplies the rates; a route whose rate becomes 0 is `none`.
        off_after: Progress from which nothing is routed.

    Raises:
        ScheduleError: If the first stage does not begin at 0, or progress does not ascend.
    """

    stages: tuple[tuple[float, Route], ...]
    factor: Schedule = Schedule()
    off_after: float = 1.0

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.stages]
        if not starts or starts[0] != 0 or not _ascends(starts):
            raise ScheduleError(
                f"routes {self}: progress must ascend from 0 to at most 1, as in 2-8/0.9:none"
            )

    @classmethod
    def parse(cls, text: str | RouteSchedule) -> RouteSchedule:
        """Read stages such as `2-8/0.5:4-8/0.9:none`; a plain route is a single stage.

        Raises:
            ScheduleError: If a stage has no progress.
            RouteError: If a stage is no route.
        """
        if isinstance(text, RouteSchedule):
            return text
        first, *later = str(text).split("/")
        stages = [(0.0, Route.parse(first))]
        for stage in later:
            start, colon, route = stage.partition(":")
            try:
                stages.append((float(start), Route.parse(route)))
            except ValueError as error:
                if isinstance(error, UserError) and colon:
                    raise
                raise ScheduleError(
                    f"routes {text}: {stage!r}: expected the fraction of training at which it "
                    f"starts, as in {first}/0.9:none"
                ) from None
        return cls(tuple(stages))

    def resolve(self, depth: int, name: str = "the model") -> RouteSchedule:
        """Return the stages with absolute routes; see `Route.resolve`."""
        stages = tuple((at, route.resolve(depth, name)) for at, route in self.stages)
        return replace(self, stages=stages)

    @property
    def first(self) -> Route:
        """The first route that is not `none`; `none` if there is no other."""
        for _, route in self.stages:
            if route:
                return route
        return self.stages[0][1]

    def at(self, progress: float) -> Route:
        """Return the route at `progress`, the fraction of the run that is done (0..1)."""
        if self.off_after <= progress and self.off_after < 1:
            return Route()
        route = [route for start, route in self.stages if start <= max(progress, 0.0)][-1]
        factor = self.factor.at(progress)
        return route if factor == 1 else route.scaled(factor)

    def __str__(self) -> str:
        first, *later = self.stages
        text = str(first[1])
        for start, route in later:
            text += f"/{_format(start)}:{route}"
        return text


def _format(value: float) -> str:
    """Format a number so that it round-trips: 1, 0.25."""
    return str(int(value)) if float(value).is_integer() else repr(value)
