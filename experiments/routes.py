"""Which route a training step takes, what model it runs in, and what that costs (no torch until a step is taken)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from routing.errors import UserError, suggest
from routing.route import MODES, Route

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
        from routing.selection import Selection

        options = config.routing
        self.options = options
        self.route = Route.parse(config.route).resolve(config.depth)
        self.selection = Selection(options.selection, shared=options.shared, block=options.block)
        self.factor = lambda progress: 1.0
        if options.schedule != "constant":
            from routing.schedule import Schedule

            self.factor = Schedule.parse(options.schedule).at

    def at(self, progress: float) -> Route:
        """Return the route at `progress`, 0 at the first step and below 1 at the last."""
        if not self.route or progress >= self.options.off_after:
            return Route()
        factor = self.factor(progress)
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


def model_arguments(config: Config, info: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `backbones.create` for a run on data with this `info`."""
    channels, height, width = info["shape"]
    # Keys that are null in the YAML take the family's or the size's own value.
    options = {k: v for k, v in config.backbone.items() if v is not None}
    return {
        **options,
        "size": config.size,
        "in_channels": channels,
        "input_size": [height, width],
        "num_classes": info["num_classes"] if config.task == "class" else 0,
        "text": info["text"] if config.task == "text" else None,
        "learn_sigma": bool(config.objective.get("learn_sigma", False)),
    }


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
    if options.selection not in MODES:
        raise UserError(
            f"routing.selection={options.selection}: expected one of {' '.join(MODES)}{suggest(options.selection, MODES)}"
        )
    if options.reinsert not in ("identity", "sum_input", "none"):
        raise UserError(f"routing.reinsert={options.reinsert}: expected identity, sum_input or none")
    after = options.remove.removeprefix("after:")
    if options.remove not in ("start", "never") and (after == options.remove or not after.isdigit()):
        raise UserError(f"routing.remove={options.remove}: expected start, never or after:BLOCK, such as after:4")
