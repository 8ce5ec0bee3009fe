"""Which route a step takes, in what model, at what cost (no torch until a step is taken)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backbones.sizes import parse_size
from routing.route import Route

if TYPE_CHECKING:
    from experiments.config import Config
    from routing import Draws, Routing, Selection


# Frozen encoders that REPA can align to, and the width of their features (experiments/align.py).
ENCODERS = {"random": 64, "probe": 96, "dinov2-vits14": 384, "dinov2-vitl14": 1024}


class TrainingRoutes:
    """The routes of one run over its steps.

    Args:
        config: The run.

    Attributes:
        route: The resolved route of the first step.
    """

    def __init__(self, config: Config) -> None:
        self.options, self.depth = config.routing, config.depth
        self.route = first_route(config)

    @property
    def selection(self) -> Selection:
        """How the tokens that stay are chosen."""
        from routing.selection import Selection

        return Selection(self.options.selection, self.options.shared, self.options.block)

    def training(self, draws: Draws, progress: float) -> Routing | None:
        """Return what the step at `progress` (0 at the first, below 1 at the last) does."""
        return self.options.routing(progress, draws, self.depth)

    def macs(self, cost: Any, progress: float) -> float:
        """Return the forward MACs of one image at `progress` (`cost` from `run_cost`)."""
        route = self.options.at(progress, self.depth)
        if not route:
            return cost.macs_dense
        if route == self.route:
            return cost.macs_routed
        # Cost is linear in the skipped token-blocks where attention is a small part: enough for a
        # budget.
        share = _skipped(route) / _skipped(self.route) if self.route else 0.0
        return cost.macs_dense + share * (cost.macs_routed - cost.macs_dense)


def _skipped(route: Route) -> float:
    return sum((s.end - s.start + 1) * s.rate for s in route.segments)


def first_route(config: Config) -> Route:
    """Return the resolved route of a run's first step: what its costs and its guidance refer to."""
    from routing.schedule import RouteSchedule

    return RouteSchedule.parse(config.route).resolve(config.depth).stages[0][1]


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
        **learned_parts(config),
    }


def learned_parts(config: Config) -> dict[str, Any]:
    """Return the arguments of what a variant adds: SPRINT's fusion, a router, REPA's projector."""
    parts: dict[str, Any] = {}
    if config.routing.learned != "none":
        key = {"fuse": "fuse", "router": "router"}[config.routing.learned]
        parts[key] = str(first_route(config))
    if config.train.encoder != "none" and config.backbone.get("align") is None:
        width = int(config.backbone.get("width") or parse_size(config.size).width)
        # REPA aligns about a third of the way up (block 8 of 28).
        parts["align"] = {
            "block": max(0, config.depth // 3 - 1),
            "channels": ENCODERS[config.train.encoder],
            "hidden": min(2048, 4 * width),
        }
    return parts


def run_cost(config: Config, model: dict[str, Any]) -> Any:
    """Return `backbones.cost.cost` for a run.

    Args:
        config: The run.
        model: The arguments of `backbones.create` (a model's `config`).
    """
    from backbones.cost import cost

    options = config.routing
    return cost(
        **model, route=first_route(config), reinsert=options.reinsert, remove=options.remove
    )


def check_routing(config: Config) -> None:
    """Refuse routes and routing options that the model cannot have, before torch is imported.

    Raises:
        UserError: One sentence.
    """
    from experiments.data.facts import facts

    _, height, width = facts(config.data)["shape"]
    patch = parse_size(config.size).patch
    name = f"{config.backbone['name']}-{config.size}"
    config.routing.check(config.depth, (height // patch, width // patch), name)
