"""Held-out loss of a dense model under each route of TREAD's Fig. 8, at inference."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

from analysis.errors import AnalysisError
from experiments.config.model import run_cost
from experiments.evaluation.heldout import HeldOut, no_split
from experiments.evaluation.images import split_indices
from routing.route import Route

_BATCH = 100


@dataclass(frozen=True)
class RouteProbe:
    """Held-out losses of one dense model, without a route and by route."""

    backbone: str
    dense: float
    losses: dict[str, float]
    macs: dict[str, float]  # MACs per training step over those of dense training


def candidate_routes(depth: int) -> list[str]:
    """Return the routes of Fig. 8 for a depth B: 0-j with 2 <= j <= B-2, i-(B-4) with i >= 1."""
    routes = [f"0-{end}" for end in range(2, depth - 1)]
    routes += [f"{start}-{depth - 4}" for start in range(1, depth - 4)]
    return routes


def probe(run: Path, step: int | None = None, samples: int = 1000) -> RouteProbe:
    """Measure the held-out loss of a dense model under every candidate route at rate 0.5.

    Raises:
        AnalysisError: The run was trained with a route, or its data have nothing held out.
    """
    data = HeldOut.open(run, step)
    config = data.config
    if config.resolved_route != "none":
        raise AnalysisError(
            f"{run} was trained with route={config.resolved_route}: expected a dense run"
        )
    missing = no_split(data.dataset)
    if missing:
        raise AnalysisError(missing)
    batches = split_indices(data.dataset, "test", samples).split(_BATCH)
    (dense,) = _mean_losses(data, batches, dense=True)
    losses, macs = {}, {}
    for route in candidate_routes(config.depth):
        routed = dataclasses.replace(config, route=route)
        model = dataclasses.replace(data, config=routed)
        (losses[route],) = _mean_losses(model, batches, dense=False)
        cost = run_cost(routed, route=Route.parse(route))
        macs[route] = cost.macs_routed / cost.macs_dense
    return RouteProbe(config.backbone["name"], dense, losses, macs)


@torch.inference_mode()
def _mean_losses(data: HeldOut, batches: tuple[torch.Tensor, ...], dense: bool) -> list[float]:
    """Return the mean loss over all samples of each pass of `HeldOut.losses`."""
    totals: list[float] = []
    count = 0
    for index in batches:
        losses = data.losses(index, dense=dense)
        totals = totals or [0.0] * len(losses)
        for position, loss in enumerate(losses):
            totals[position] += float(loss) * len(index)
        count += len(index)
    return [total / count for total in totals]
