"""Options of routing in a training run (no torch here)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, get_args

from routing.errors import UserError, one_of, require
from routing.route import MODES, Route, RouteSchedule, Segment, SelectionMode, keep_count
from routing.schedule import Schedule

Reinsertion = Literal["identity", "sum_input", "none"]
LearnedPart = Literal["none", "fuse"]


class OmittedAtDefault:
    """The type of `OMITTED_AT_DEFAULT`."""


#: Annotates an option that is newer than runs which were published: it enters the hash of a run
#: only at another value than its default, so that the names of those runs stay valid.
OMITTED_AT_DEFAULT = OmittedAtDefault()


class RoutingError(UserError):
    """Routing options that contradict each other or the stack."""


class SelectionError(RoutingError):
    """A selection that cannot be made on this grid or at this rate."""


_require = partial(require, error=RoutingError)
_SORTED = [mode for mode in MODES if mode != "unsorted"]


@dataclass(frozen=True)
class RoutingOptions:
    """Routing settings other than the route: which tokens stay, and when they return.

    `reinsert` is what routed tokens become at a segment's end: their state from before it
    (`identity`); that plus the network's input (`sum_input`: v1's second route; a segment that
    starts at block 0 has only the input and adds nothing); or nothing: dropped tokens never return
    (`none`). `remove` is when tokens leave: at the segment's `start`; `after:<k>`, once block k has
    seen all of them (delayed removal); or `never`: all blocks see all tokens, and at the end routed
    tokens still fall back to their state from the start (a control). With `random_end`, every
    segment's end is drawn for each step, from its start up to its end (v1). `path_drop` is the
    share of samples whose fused span is left out (SPRINT); 1 skips its blocks.
    """

    # Per pass.
    selection: Annotated[
        SelectionMode,
        f"Which tokens stay: {', '.join(_SORTED)}; unsorted is the control that breaks scan order.",
    ] = "random"
    shared: Annotated[bool, "One subset for the whole batch instead of one per sample."] = False
    block: Annotated[int, "Side of the squares that selection=blocks keeps or drops whole."] = 2
    reinsert: Annotated[
        Reinsertion,
        "What comes back at a route's end: identity (the paper's v2/v3), sum_input (v1), none "
        "(dropped for good).",
    ] = "identity"
    remove: Annotated[
        str,
        "When the tokens leave: start, after:K (delayed removal), never (control: all blocks see "
        "all tokens).",
    ] = "start"
    random_end: Annotated[
        bool, "v1's random end: a route's end is drawn each step between its start and its end."
    ] = False
    # Per model; path_drop acts on the learned part in each training pass.
    fp32_after: Annotated[
        bool, "The block after a route's end runs in fp32 under autocast, as in the official code."
    ] = True
    checkpoint: Annotated[
        bool, "Recompute the activations of blocks inside routes in the backward pass."
    ] = False
    learned: Annotated[
        LearnedPart, "A learned part on the route's span: fuse (SPRINT's fusion) or none."
    ] = "none"
    path_drop: Annotated[
        float, "Share of samples whose fused span is left out while training (SPRINT: 0.1)."
    ] = 0.0
    # Per run: the route at each step.
    schedule: Annotated[
        str,
        "Factor of the rate over the run: constant, linear:1:0, cosine:0:1:0.2, steps:1@0+0.5@0.6.",
    ] = "constant"
    off_after: Annotated[
        float,
        "Switch routing off after this share of the steps (1: never): a dense fine-tune in the "
        "same run.",
    ] = 1.0

    def schedule_route(self, route: str, depth: int, name: str = "the model") -> RouteSchedule:
        """Return the route at each point of training, with absolute block indices.

        Args:
            route: A route, or stages of routes, as in `2-8/0.5:4-8/0.9:none`.
            depth: Number of blocks.
            name: What to call the model in an error.

        Raises:
            UserError: A `RouteError` or `ScheduleError`.
        """
        stages = RouteSchedule.parse(route).resolve(depth, name).stages
        return RouteSchedule(stages, Schedule.parse(self.schedule), self.off_after)

    def check(self, routes: RouteSchedule, depth: int, grid: tuple[int, int] | None = None) -> None:
        """Refuse options that contradict each other, the routes or the model.

        Args:
            routes: What `schedule_route` returned.
            depth: Number of blocks.
            grid: Rows and columns of tokens, where they are known.

        Raises:
            RoutingError: One sentence with the option, its value and what was expected.
        """
        for _, route in routes.stages:
            check_reinsertion(self.reinsert, self.remove, route, self.random_end)
            for segment in route.segments:
                self._check_segment(segment, routes.factor, depth, grid)
        rate = only_rate(self.selection)
        _require(
            rate is None or routes.factor.kind == "constant",
            f"selection={self.selection}: needs the rate {rate} throughout; try schedule=constant",
        )
        _require(self.block >= 1, f"block={self.block}: expected an integer >= 1")
        for key in ("path_drop", "off_after"):
            share = getattr(self, key)
            _require(0 <= share <= 1, f"{key}={share:g}: expected a fraction, 0 to 1")
        _require(
            not self.path_drop or self.learned == "fuse",
            f"path_drop={self.path_drop}: leaves a fused span out; try learned=fuse with it",
        )
        if self.learned != "none":
            self._check_learned(routes)

    def _check_segment(
        self, segment: Segment, factor: Schedule, depth: int, grid: tuple[int, int] | None
    ) -> None:
        """Refuse a segment that drops nothing, or whose rate leaves its range during the run."""
        _require(
            self.reinsert != "none" or segment.drop_before(self.remove) < depth,
            f"remove={self.remove} with reinsert=none: drops nothing, since block {depth - 1} is "
            "the last one; try remove=start",
        )
        rate = segment.rate * factor.largest
        _require(
            rate < 1,
            f"schedule={self.schedule}: takes the rate of route {segment} to {rate:g}, and it "
            "must stay below 1",
        )
        if grid is not None and self.selection in CONSTRAINTS:
            CONSTRAINTS[self.selection].check(grid, keep_count(grid[0] * grid[1], rate))

    def _check_learned(self, routes: RouteSchedule) -> None:
        """Refuse what a fused span cannot have: it is trained for one span."""
        learned = f"learned={self.learned}"
        first = routes.first.segments
        _require(
            first,
            f"{learned}: needs a span; try route=auto, with off_after=0 for a model that has it "
            "and is trained dense",
        )
        for _, route in routes.stages:
            spans = [(segment.start, segment.end) for segment in route.segments]
            _require(
                spans in ([], [(first[0].start, first[0].end)]),
                f"{learned}: belongs to one span, and route {routes} has {route} too; "
                f"try route={first[0]}",
            )
        _require(
            not self.random_end,
            f"{learned}: belongs to one span and random_end draws others; try random_end=false",
        )
        _require(
            self.reinsert == "identity",
            f"{learned}: re-inserts in its own way; try reinsert=identity, not {self.reinsert}",
        )


def check_reinsertion(reinsert: str, remove: str, route: Route, random_end: bool = False) -> None:
    """Refuse a re-insertion or removal (see `RoutingOptions`) that does not exist or fit the route.

    Whether the block of `after:<k>` lies in the route is known once the route is resolved.
    """
    one_of("reinsert", reinsert, get_args(Reinsertion), RoutingError)
    if reinsert == "none":
        _require(
            len(route.segments) <= 1,
            "reinsert=none: drops tokens for good; try a route of a single segment",
        )
        _require(not random_end, "reinsert=none: has no end to draw; try random_end=false")
        _require(
            remove != "never",
            "reinsert=none: drops tokens and remove=never does not; try remove=start",
        )
    if remove in ("start", "never"):
        return
    prefix, _, block = remove.partition(":")
    _require(
        prefix == "after" and block.isdecimal(),
        f"remove={remove}: expected start, never or after:<block>, as in after:4",
    )
    _require(not random_end, f"remove={remove}: contradicts random_end; try remove=start")
    if route and route.resolved and int(block) not in route.sparse_blocks:
        raise RoutingError(
            f"remove={remove}: block {block} is not in route {route}; "
            f"try remove=after:{route.sparse_blocks[:2][-1]}"
        )


@dataclass(frozen=True)
class Constraint:
    """Requirements of a selection that works for some grids or rates only.

    Attributes:
        rate: The only rate at which it can select; None if there are several.
        check: Raises a `RoutingError` for a grid (rows, columns) or a number of kept tokens that it
            cannot have.
    """

    rate: float | None
    check: Callable[[tuple[int, int], int], None]


def _check_quad(grid: tuple[int, int], keep: int) -> None:
    height, width = grid
    _require(
        height % 2 == 0 and width % 2 == 0,
        f"selection=quad: keeps one of every 2x2, and a grid of {height}x{width} is odd; "
        "try selection=random",
    )
    _require(
        keep * 4 == height * width,
        f"selection=quad: keeps one token of every 2x2, {height * width // 4} of {height * width} "
        f"and not {keep}; try the rate 0.75 and no schedule: route=2-8@0.75",
    )


#: Selections that work for some grids or rates only; all others keep any number of tokens.
CONSTRAINTS = {"quad": Constraint(0.75, _check_quad)}


def only_rate(selection: str) -> float | None:
    """Return the only rate at which a selection can keep tokens, None if any will do."""
    return CONSTRAINTS[selection].rate if selection in CONSTRAINTS else None
