"""Suggest a route from a dense model: its held-out loss when half of the tokens skip blocks.

    python -m analysis suggest-route RUN
    python -m analysis suggest-route RUN --trained results/fig8.tar.gz

Exploratory. Every route of the form of TREAD's Fig. 8 is tried at inference on a model that was
trained without one. A route is suggested where no other saves as much at a lower loss. `--trained`
compares with runs that were trained with these routes: Spearman's rank correlation of both losses,
beside that of the number of skipped blocks alone, and how often the probe picks the better of two
routes that skip as many blocks.
"""

import argparse
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from scipy.stats import spearmanr

from analysis.comparison.results import Results
from analysis.comparison.step_penalty import loss_curves
from analysis.errors import AnalysisError
from analysis.runs.archives import PUBLISHED, unpack
from analysis.tables.table import markdown_rows
from experiments.config.model import run_cost
from experiments.evaluation.heldout import HeldOut, no_split
from experiments.evaluation.images import split_indices
from experiments.runtime.command import ROOT
from routing.errors import require

_BATCH = 100  # held-out samples per pass
_TIE = 5e-4  # relative difference of probe losses below which two routes are level


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
    dense = _mean_loss(data, batches, dense=True)
    losses, macs = {}, {}
    for route in candidate_routes(config.depth):
        routed = dataclasses.replace(config, route=route)
        losses[route] = _mean_loss(dataclasses.replace(data, config=routed), batches, dense=False)
        cost = run_cost(routed, route=routed.first_route)
        macs[route] = cost.macs_routed / cost.macs_dense
    return RouteProbe(config.backbone.name, dense, losses, macs)


@torch.inference_mode()
def _mean_loss(data: HeldOut, batches: tuple[torch.Tensor, ...], dense: bool) -> float:
    """Return the mean loss over all samples of the dense pass, or of the routed one."""
    total = sum(len(index) * float(data.losses(index, dense=dense)[0]) for index in batches)
    return total / sum(map(len, batches))


def undominated(losses: Mapping[str, float], macs: Mapping[str, float]) -> set[str]:
    """Return the routes for which no other has both fewer or as many MACs and a lower loss."""
    chosen = set()
    for route in losses:
        is_beaten = False
        for rival in losses:
            saves_as_much = macs[rival] <= macs[route] * (1 + 1e-6)
            if rival != route and saves_as_much and losses[rival] < losses[route]:
                is_beaten = True
        if not is_beaten:
            chosen.add(route)
    return chosen


def block_count(route: str) -> int:
    """Return how many blocks a route such as 2-8 skips."""
    start, end = route.split("-")
    return int(end) - int(start) + 1


def trained_losses(source: Path, backbone: str) -> dict[str, float]:
    """Return the held-out loss by route of trained runs of a backbone, mean over their seeds.

    Raises:
        AnalysisError: There is no such run.
    """
    runs = Results.of(source).runs
    is_plain = runs["variant"].str.fullmatch(r"\d+-\d+")  # no other rate, selection or variant
    runs = runs[(runs["backbone"] == backbone) & is_plain]
    if runs.empty:
        raise AnalysisError(f"no run of {backbone} with a plain route in {source}")
    # Other options of the backbone are other groups: the one with the most runs counts.
    runs = runs[runs["group"] == runs["group"].value_counts().index[0]]
    curves = loss_curves(runs)
    values: dict[str, list[float]] = {}
    for run, route in zip(runs["run"], runs["variant"], strict=True):
        if run in curves:
            values.setdefault(str(route), []).append(float(curves[run]["loss"].iloc[-1]))
    return {route: sum(losses) / len(losses) for route, losses in values.items()}


@dataclass(frozen=True)
class RankAgreement:
    """How a probe orders routes, compared with runs that were trained with them."""

    routes: int
    correlation: float
    length_correlation: float  # of the number of skipped blocks alone
    pairs: int  # of routes that skip as many blocks
    agreeing: int  # of these, those that the probe orders as training does
    tied: int  # of these, those that the probe does not separate


def rank_agreement(losses: Mapping[str, float], trained: Mapping[str, float]) -> RankAgreement:
    """Compare probe and trained losses over the routes that both have.

    Raises:
        AnalysisError: Fewer than three routes are in both.
    """
    routes = sorted(set(losses) & set(trained))
    if len(routes) < 3:
        raise AnalysisError(f"{len(routes)} routes in common: expected at least 3 trained routes")
    after = [trained[route] for route in routes]
    correlation = spearmanr([losses[route] for route in routes], after)[0]
    length_correlation = spearmanr([block_count(route) for route in routes], after)[0]
    pairs = agreeing = tied = 0
    for index, first in enumerate(routes):
        for second in routes[index + 1 :]:
            if block_count(first) != block_count(second):
                continue
            pairs += 1
            difference = losses[first] - losses[second]
            if abs(difference) < _TIE * losses[first]:
                tied += 1
            elif difference * (trained[first] - trained[second]) > 0:
                agreeing += 1
    return RankAgreement(
        len(routes), float(correlation), float(length_correlation), pairs, agreeing, tied
    )


def command(options: argparse.Namespace) -> int:
    """Print the held-out loss of every route at inference, and with `trained` the agreement."""
    text = f"--samples {options.samples}: expected a positive number"
    require(options.samples > 0, text, AnalysisError)
    records = unpack(options.trained, ROOT / PUBLISHED) if options.trained is not None else None
    measured = probe(options.run, options.step, options.samples)
    best = undominated(measured.losses, measured.macs)
    head = ["Route", "Blocks", "MACs per step", "Held-out loss", "Suggested"]
    rows = [["none", "0", "1.00x", f"{measured.dense:.4f}", ""]]
    for route in sorted(measured.losses, key=measured.losses.__getitem__):
        macs, loss = f"{measured.macs[route]:.2f}x", f"{measured.losses[route]:.4f}"
        rows.append([route, str(block_count(route)), macs, loss, "yes" if route in best else ""])
    print(markdown_rows(head, rows))
    if records is not None:
        trained = trained_losses(records, measured.backbone)
        print(_agreement_text(rank_agreement(measured.losses, trained)))
    return 0


def _agreement_text(result: RankAgreement) -> str:
    return (
        f"rank correlation with {result.routes} trained routes: {result.correlation:.2f} "
        f"(number of blocks alone: {result.length_correlation:.2f}); of {result.pairs} pairs that "
        f"skip as many blocks {result.agreeing} are ordered as after training, {result.tied} tied"
    )
