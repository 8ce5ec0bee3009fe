"""Everything that can be said about routing in a config, checked before torch is imported."""

from dataclasses import dataclass

from routing.errors import UserError, one_of
from routing.route import MODES, Route, RouteSchedule, Schedule, keep_count

REINSERT = ("identity", "sum_input", "none")
LEARNED = ("none", "fuse")


class RoutingError(UserError):
    """Routing options that contradict each other or the stack."""


@dataclass(frozen=True)
class RoutingOptions:
    """The routing of a training run.

    Args:
        route: A route, or stages of routes (`routing.route.RouteSchedule`).
        selection: How the tokens that stay are chosen, one of `MODES`.
        shared: One subset for the whole batch.
        block: Side of the squares of `selection=blocks`.
        reinsert, remove, random_end: As in `Routing`.
        fp32_after, checkpoint: As in `Stack`.
        learned: `fuse` (SPRINT's fusion) on the span.
        path_drop: Share of samples whose fused span is left out in training (SPRINT: 0.1).
        schedule: Factor of the rate over progress (`routing.route.Schedule`).
        off_after: Progress from which nothing is routed.
    """

    route: str = "none"
    selection: str = "random"
    shared: bool = False
    block: int = 2
    reinsert: str = "identity"
    remove: str = "start"
    random_end: bool = False
    fp32_after: bool = True
    checkpoint: bool = False
    learned: str = "none"
    path_drop: float = 0.0
    schedule: str = "constant"
    off_after: float = 1.0

    def resolve(self, depth: int, name: str = "the model") -> RouteSchedule:
        """Parse what the steps need: routes with absolute ends and the factor of their rates."""
        stages = RouteSchedule.parse(self.route).resolve(depth, name).stages
        return RouteSchedule(stages, Schedule.parse(self.schedule), self.off_after)

    def check(
        self, depth: int, grid: tuple[int, int] | None = None, name: str = "the model"
    ) -> None:
        """Refuse what cannot run, without importing torch.

        Args:
            depth: Number of blocks.
            grid: Rows and columns of tokens, where they are known.
            name: What to call the model in an error.

        Raises:
            UserError: A `RouteError`, `ScheduleError` or `RoutingError`.
        """
        routes = self.resolve(depth, name)
        schedule = routes.factor
        one_of("selection", self.selection, MODES, RoutingError)
        one_of("learned", self.learned, LEARNED, RoutingError)
        for _, route in routes.stages:
            check_words(self.reinsert, self.remove, route, self.random_end)
            for segment in route.segments:
                if self.reinsert == "none" and segment.drop_before(self.remove) >= depth:
                    raise RoutingError(
                        f"remove {self.remove} with reinsert none drops nothing: block "
                        f"{depth - 1} is the last one; try remove=start"
                    )
                rate = segment.rate * schedule.largest
                if rate >= 1:
                    raise RoutingError(
                        f"schedule {self.schedule}: takes the rate of route {segment} to "
                        f"{rate:g}, and it must stay below 1"
                    )
                if grid is not None and self.selection == "quad":
                    check_quad(grid, keep_count(grid[0] * grid[1], rate))
        if self.selection == "quad" and schedule.kind != "constant":
            raise RoutingError(
                "selection quad needs the rate 0.75 throughout; try schedule=constant"
            )
        if self.block < 1:
            raise RoutingError(f"block={self.block}: expected a whole number of at least 1")
        for key in ("path_drop", "off_after"):
            if not 0 <= getattr(self, key) <= 1:
                raise RoutingError(f"{key}={getattr(self, key):g}: expected a fraction, 0 to 1")
        if self.path_drop and self.learned != "fuse":
            raise RoutingError("path_drop leaves a fused span out; try learned=fuse with it")
        if self.learned != "none":
            self._check_learned(routes)

    def _check_learned(self, routes: RouteSchedule) -> None:
        """Refuse what a fused span cannot have: it is trained for one span."""
        own = routes.first.segments
        if not own:
            raise RoutingError(
                f"learned={self.learned} needs a span; try route=auto, with off_after=0 for a "
                "model that has it and is trained dense"
            )
        for _, route in routes.stages:
            spans = [(s.start, s.end) for s in route.segments]
            if spans and spans != [(own[0].start, own[0].end)]:
                raise RoutingError(
                    f"learned={self.learned} belongs to one span, and route {routes} has "
                    f"{route} too; try route={own[0]}"
                )
        if self.random_end:
            raise RoutingError(
                f"learned={self.learned} belongs to one span and random_end draws others; try "
                "random_end=false"
            )
        if self.reinsert != "identity":
            raise RoutingError(
                f"learned={self.learned} re-inserts in its own way; try reinsert=identity, not "
                f"{self.reinsert}"
            )


def check_words(reinsert: str, remove: str, route: Route, random_end: bool = False) -> None:
    """Refuse a re-insertion or removal (see `Routing`) that does not exist or fit the route.

    Whether the block of `after:<k>` lies in the route is known once the route is resolved.
    """
    one_of("reinsert", reinsert, REINSERT, RoutingError)
    if reinsert == "none" and len(route.segments) > 1:
        raise RoutingError("reinsert none drops tokens for good; try a route of a single segment")
    if reinsert == "none" and random_end:
        raise RoutingError("reinsert none has no end to draw; try random_end=false")
    after = remove.removeprefix("after:")
    if remove not in ("start", "never") and (after == remove or not after.isdecimal()):
        raise RoutingError(
            f"remove {remove!r}: expected start, never or after:<block>, as in after:4"
        )
    if after != remove and random_end:
        raise RoutingError("remove after a block and random_end contradict; try remove=start")
    if after != remove and route and route.resolved and int(after) not in route.sparse_blocks:
        raise RoutingError(
            f"remove {remove}: block {after} is not in route {route}; "
            f"try remove=after:{route.sparse_blocks[:2][-1]}"
        )
    if reinsert == "none" and remove == "never":
        raise RoutingError("reinsert none drops tokens and remove never does not; try remove=start")


def check_quad(grid: tuple[int, int], keep: int) -> None:
    """Refuse a grid (rows, columns) or a count of kept tokens that `selection=quad` cannot have."""
    height, width = grid
    if height % 2 or width % 2:
        raise RoutingError(
            f"selection quad keeps one of every 2x2, and a grid of {height}x{width} is odd; "
            "try selection=random"
        )
    if keep * 4 != height * width:
        raise RoutingError(
            f"selection quad keeps one token of every 2x2, {height * width // 4} of "
            f"{height * width} and not {keep}; try the rate 0.75 and no schedule: route=2-8@0.75"
        )
