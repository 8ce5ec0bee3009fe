"""A factor over a run's progress, by which the rate of its route is multiplied (no torch here).

Progress is 0 at the first step and below 1 at the last.

    constant          constant:0.5         the same throughout
    linear:1:0        linear:0:1:0.2       from one factor to another, here over the first fifth
    cosine:1:0        cosine:0:1:0.2       the same along half a cosine
    steps:1@0+0.5@0.6                      a factor from each given progress on
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from routing.errors import UserError, require, suggest

KINDS = ("constant", "linear", "cosine", "steps")
_FACTORS = "constant, linear:1:0, cosine:1:0:0.5 or steps:1@0+0.5@0.6"


class ScheduleError(UserError):
    """A schedule that cannot be read or leaves its range."""


def ascends(starts: list[float]) -> bool:
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
        count = {"constant": 1, "linear": 2, "cosine": 2}.get(self.kind, len(self.points))
        starts = [point[0] for point in self.points]
        factors = [point[1] for point in self.points]
        problem = ""
        if self.kind not in KINDS:
            problem = f"{self.kind}: expected {_FACTORS}{suggest(self.kind, KINDS)}"
        elif len(starts) != count or not starts or starts[0] != 0:
            problem = f"{self.kind}: begins at progress 0; expected {_FACTORS}"
        elif not ascends(starts):
            problem = f"{self}: progress must ascend from 0 to at most 1"
        elif not all(0 <= factor < math.inf for factor in factors):
            problem = f"{self}: a factor is 0 or more; try linear:1:0"
        require(not problem, f"schedule={problem}", ScheduleError)

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
            raise ScheduleError(f"schedule={text}: expected {_FACTORS}") from None
        if kind in ("linear", "cosine") and len(numbers) in (0, 2, 3):
            first, last, until = (*(numbers or (1.0, 0.0)), 1.0)[:3]
            return cls(kind, ((0.0, first), (until, last)))
        if kind == "constant" and len(numbers) < 2:
            return cls(kind, ((0.0, numbers[0] if numbers else 1.0),))
        raise ScheduleError(f"schedule={text}: expected {_FACTORS}{suggest(kind, KINDS)}")

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
                f"{format_number(value)}@{format_number(at)}" for at, value in self.points
            )
        if self.kind == "constant":
            value = self.points[0][1]
            return "constant" if value == 1 else f"constant:{format_number(value)}"
        (_, first), (until, last) = self.points
        return f"{self.kind}:{format_number(first)}:{format_number(last)}" + (
            "" if until == 1 else f":{format_number(until)}"
        )


def format_number(value: float) -> str:
    """Format a number so that it round-trips: 1, 0.25."""
    return str(int(value)) if float(value).is_integer() else repr(value)


UNCHANGED = Schedule()
