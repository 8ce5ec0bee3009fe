"""A route (`2-8@0.75`): which blocks the routed tokens skip (no torch here).

TREAD (Krause et al., ICCV 2025) sends a fraction of the tokens past blocks i..j, both ends
included, while the rest are processed as usual (formula in `routing.stack`). With 12 blocks,
`2-8` is

    0 1 [2 3 4 5 6 7 8] 9 10 11

Grammar, the same on the command line, in YAML and in run names:

    none            no route
    2-8             blocks 2..8, half of the tokens skip
    2-8@0.75        three quarters skip
    2--4            a negative end counts from the last block: 2-8 at depth 12
    auto, auto@0.75 the paper's guideline, the same as 2--4
    0-4+6-9         one after the other; also 0-4,6-9 and a list

A `RouteSchedule` names a route from each given progress on, `2-8/0.5:4-8/0.9:none`; a run that ends
densely is `2-8/0.9:none`. Progress is 0 at the first step of a run and below 1 at the last.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, get_args

from routing.errors import UserError, require
from routing.schedule import UNCHANGED, Schedule, ScheduleError, ascends, format_number

DEFAULT_RATE = 0.5  # TREAD, Table 5: the best of 0, 0.25, 0.5 and 0.75
# How tokens are chosen in `routing.routed_pass.SELECTIONS`; here, so that checking needs no torch.
SelectionMode = Literal["random", "rows", "columns", "blocks", "stride", "quad", "unsorted"]
MODES: tuple[str, ...] = get_args(SelectionMode)
AUTO = (2, -4)  # TREAD, Table 6: absolute placement, start 2 and end depth - 4

_RANGE = re.compile(r"(-?\d{1,18})\s*-\s*(-?\d{1,18})")
_FORMS = "none, auto, 2-8, 2-8@0.75, 2--4 or 0-4+6-9"


class RouteError(UserError):
    """An invalid route: the message says what is wrong and what to type instead."""


class RouteFitError(RouteError):
    """A well-formed route that does not fit the depth of a model."""


@dataclass(frozen=True)
class Segment:
    """One stretch of blocks that routed tokens skip.

    Args:
        start: First block skipped; negative counts from the last block.
        end: Last block skipped (inclusive); negative counts from the last block.
        rate: Fraction of the grid's tokens that skip, strictly between 0 and 1.

    Raises:
        RouteError: If the rate is not a fraction or an end is not a whole number.
    """

    start: int
    end: int
    rate: float = DEFAULT_RATE

    def __post_init__(self) -> None:
        typed = f"route={self.start}-{self.end}"
        are_blocks = type(self.start) is int and type(self.end) is int
        require(are_blocks, f"{typed}: expected two block indices; try route=2-8", RouteError)
        is_number = isinstance(self.rate, int | float) and not isinstance(self.rate, bool)
        rate = float(self.rate) if is_number else math.nan
        share = rate / 100 if 2 <= rate < 100 else 0.5  # meant as per cent
        better = f"{typed}@{share:g}" if rate != 0 else "route=none"
        rate_text = f"{rate:g}" if is_number else self.rate
        require(
            0 < rate < 1,
            f"{typed}@{rate_text}: expected a number between 0 and 1, the fraction of tokens that "
            f"skip; try {better}",
            RouteError,
        )
        object.__setattr__(self, "rate", rate)

    @property
    def span(self) -> str:
        """The two ends without the rate, `2-8`."""
        return f"{self.start}-{self.end}"

    def drop_before(self, remove: str) -> int:
        """Index of the first block that sees fewer tokens, in a resolved route (see `Routing`)."""
        if remove == "never":
            return self.end + 1
        after = int(remove.removeprefix("after:")) if remove != "start" else -1
        return after + 1 if self.start <= after <= self.end else self.start

    def __str__(self) -> str:
        return self.span if self.rate == DEFAULT_RATE else f"{self.span}@{self.rate!r}"


@dataclass(frozen=True)
class Route:
    """Segments in the order of the blocks; no segments is `none`.

    Args:
        segments: The stretches of blocks, unresolved until `resolve` has seen the depth.
    """

    segments: tuple[Segment, ...] = ()

    @classmethod
    def parse(cls, text: str | Sequence | Route | None) -> Route:
        """Read a route from text or from a list of texts.

        Args:
            text: `none`, `auto[@rate]`, `start-end[@rate]`, several joined by `+` or `,`, or a
                list of such texts.

        Raises:
            RouteError: If it is not a route.
        """
        if text is None:
            return cls()
        if isinstance(text, Route):
            return text
        if not isinstance(text, Sequence):
            raise RouteError(_unreadable(text))
        joined = text if isinstance(text, str) else "+".join(map(str, text)) or "none"
        items = [item.strip() for item in re.split("[,+]", joined.strip(" []()'\""))]
        if items == ["none"]:
            return cls()
        return cls(tuple(_segment(item, text) for item in items))

    def resolve(self, depth: int, name: str = "the model") -> Route:
        """Return the route with absolute ends, checked against the depth of the model `name`.

        Raises:
            RouteError: If a segment is reversed, leaves the blocks, or does not follow the one
                before it; a `RouteFitError` where that depends on the depth.
        """
        absolute = tuple(_resolve(segment, depth, name) for segment in self.segments)
        ends = [(first.end, second.start) for first, second in pairwise(self.segments)]
        for (first, second), (end, start) in zip(pairwise(absolute), ends, strict=True):
            # An end and a start that count from the same side overlap at any depth.
            same_side = (end < 0) == (start < 0)
            require(
                first.end < second.start,
                f"route={self}: {second.span} must start after the end of {first.span}",
                RouteError if same_side else RouteFitError,
            )
        return Route(absolute)

    def with_rate(self, rate: float) -> Route:
        """Return the same stretches at another rate, 0..1; at 0 nothing skips, which is `none`."""
        if rate == 0:
            return Route()
        return Route(tuple(replace(segment, rate=rate) for segment in self.segments))

    def scaled(self, factor: float) -> Route:
        """Return the route with all rates multiplied; segments whose rate becomes 0 are gone."""
        rates = [(segment, segment.rate * factor) for segment in self.segments]
        return Route(tuple(replace(segment, rate=rate) for segment, rate in rates if rate > 0))

    @property
    def resolved(self) -> bool:
        """Whether no end still counts from the last block."""
        return all(segment.start >= 0 and segment.end >= 0 for segment in self.segments)

    @property
    def sparse_blocks(self) -> tuple[int, ...]:
        """Indices of the blocks that see fewer tokens (of a resolved route).

        Raises:
            RouteError: If an end still counts from the last block.
        """
        if not self.resolved:
            raise RouteError(f"route={self}: its blocks are known only after resolve(depth)")
        return tuple(i for s in self.segments for i in range(s.start, s.end + 1))

    def ruler(self, depth: int) -> str:
        """Draw the blocks with the route, `0 1 [2 3 4 5 6 7 8] 9 10 11`."""
        route = self.resolve(depth)
        opens = {segment.start for segment in route.segments}
        closes = {segment.end for segment in route.segments}
        return " ".join(
            f"{'[' if i in opens else ''}{i}{']' if i in closes else ''}" for i in range(depth)
        )

    def __str__(self) -> str:
        return "+".join(map(str, self.segments)) if self.segments else "none"

    def __bool__(self) -> bool:
        return bool(self.segments)


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
    factor: Schedule = UNCHANGED
    off_after: float = 1.0

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.stages]
        require(
            starts and starts[0] == 0 and ascends(starts),
            f"route={self}: progress must ascend from 0 to at most 1, as in 2-8/0.9:none",
            ScheduleError,
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
                    f"route={text}: {stage!r}: expected the fraction of training at which it "
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
        return route if self.factor == UNCHANGED else route.scaled(self.factor.at(progress))

    def __str__(self) -> str:
        first, *later = self.stages
        text = str(first[1])
        for start, route in later:
            text += f"/{format_number(start)}:{route}"
        return text


def keep_count(n: int, rate: float) -> int:
    """Return how many of `n` grid tokens stay at a rate: `n - floor(n * rate)`, and never none."""
    # A rate is meant as a decimal: 100 * 0.29 is 28.999999999999996. Just below 1, one stays.
    return n - min(int(n * rate + 1e-9), max(n - 1, 0))


def _unreadable(whole: object) -> str:
    hint = f"; try route={whole}-{whole}" if re.fullmatch(r"\d+", str(whole).strip()) else ""
    return f"route={whole}: expected {_FORMS}{hint}"


def _segment(item: str, whole: object) -> Segment:
    """Read one segment; `whole` is what the user typed, for the message."""
    span, at, rate = item.partition("@")
    span = span.strip()
    if span == "none":
        raise RouteError(f"route={whole}: none stands alone; try route=none")
    match = _RANGE.fullmatch(span)
    if span != "auto" and match is None:
        raise RouteError(_unreadable(whole))
    start, end = AUTO if match is None else (int(match[1]), int(match[2]))
    return Segment(start, end, _rate(rate, span) if at else DEFAULT_RATE)


def _rate(text: str, span: str) -> float:
    try:
        return float(text)
    except ValueError:
        percent = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
        better = f"{span}@{float(percent[1]) / 100:g}" if percent else f"{span}@0.5"
        raise RouteError(
            f"route={span}@{text}: the rate must be a number; try route={better}"
        ) from None


def _resolve(segment: Segment, depth: int, name: str) -> Segment:
    start = segment.start + depth if segment.start < 0 else segment.start
    end = segment.end + depth if segment.end < 0 else segment.end
    last = depth - 1
    low, high = sorted((min(max(start, 0), last), min(max(end, 0), last)))
    better = replace(segment, start=low, end=high)
    problem = ""
    if not (0 <= start <= last and 0 <= end <= last):
        problem = f": {name} has {depth} block{'s' if depth != 1 else ''}, 0..{last}"
    elif start > end:
        resolved = "" if (start, end) == (segment.start, segment.end) else f" ({start}-{end} here)"
        problem = f"{resolved}: start must not exceed end; blocks are 0..{last}"
    # Ends that count from the same side are reversed at any depth.
    same_side = (segment.start < 0) == (segment.end < 0)
    kind = RouteError if same_side and start > end else RouteFitError
    require(not problem, f"route={segment}{problem}; try route={better}", kind)
    return replace(segment, start=start, end=end)
