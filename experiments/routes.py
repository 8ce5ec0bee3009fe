"""Which route a training step takes, and what it costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from routing.errors import UserError
from routing.route import Route

if TYPE_CHECKING:
    from experiments.config import Config
    from routing import Draws, Routing


class TrainingRoutes:
    """The routes of one run over its steps.

    Args:
        config: The run.

    Attributes:
        route: Resolved route without a schedule applied.
    """

    def __init__(self, config: Config) -> None:
        from routing.schedule import Schedule
        from routing.selection import Selection

        options = config.routing
        self.options = options
        self.route = Route.parse(config.route).resolve(config.depth)
        self.selection = Selection(options.selection, shared=options.shared, block=options.block)
        self.schedule = Schedule.parse(options.schedule)

    def at(self, progress: float) -> Route:
        """Return the route at `progress`, 0 at the first step and below 1 at the last."""
        if not self.route or progress >= self.options.off_after:
            return Route()
        factor = self.schedule.at(progress)
        if factor == 1:
            return self.route
        rate = self.route.segments[0].rate * factor
        return self.route.with_rate(rate) if rate > 0 else Route()

    def training(self, draws: Draws, progress: float) -> Routing | None:
        """Return what this step does about routes; None is a dense step."""
        from routing import Routing

        route = self.at(progress)
        if not route:
            return None
        options = self.options
        return Routing(
            route,
            self.selection,
            draws,
            reinsert=options.reinsert,
            remove=options.remove,
            random_end=options.random_end,
        )

    def macs(self, cost: Any, progress: float) -> float:
        """Return the forward MACs of one image at `progress` (`cost` from `run_cost`)."""
        route = self.at(progress)
        if not route:
            return cost.macs_dense
        if route == self.route:
            return cost.macs_routed
        # Cost is linear in the rate where attention is a small part; exact enough for a budget.
        share = route.segments[0].rate / self.route.segments[0].rate
        return cost.macs_dense + share * (cost.macs_routed - cost.macs_dense)


def run_cost(config: Config, model: dict[str, Any]) -> Any:
    """Return `backbones.cost.cost` for a run.

    Args:
        config: The run.
        model: The arguments of `backbones.create` (a model's `config`).
    """
    from backbones.cost import cost

    route = Route.parse(config.route).resolve(config.depth)
    return cost(**model, route=route)


def check_routes(config: Config) -> None:
    """Refuse routing options that the data or the route cannot have, before torch is imported.

    Raises:
        UserError: One sentence.
    """
    options = config.routing
    if options.reinsert not in ("identity", "sum_input", "none"):
        raise UserError(f"routing.reinsert={options.reinsert}: expected identity, sum_input or none")
    after = options.remove.removeprefix("after:")
    if options.remove not in ("start", "never") and (after == options.remove or not after.isdigit()):
        raise UserError(f"routing.remove={options.remove}: expected start, never or after:BLOCK, such as after:4")
