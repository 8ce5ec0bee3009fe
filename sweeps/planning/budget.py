"""What runs cost, and the steps at which dense and routed meet at equal cost (no torch here).

At equal FLOPs a routed run gets `steps * dense / routed` steps (forward MACs of one image; backward
is twice the forward for both; what REPA's frozen encoder adds is not counted). At equal hours it is
`steps * speed / speed of the dense run`, from speeds that runs measured.
"""

from collections.abc import Sequence
from pathlib import Path

from experiments.config import Config, load, role
from experiments.runtime.console import big
from experiments.training import run_folder
from experiments.training.routes import TrainingRoutes, run_cost
from routing.errors import one_of
from sweeps import SweepError
from sweeps.planning.planned_runs import Budget, Plan


def training_macs(config: Config) -> float:
    """Return the forward MACs of a whole run, schedules of the route included."""
    routes, steps = TrainingRoutes(config), config.train.steps
    routing = config.routing
    plain = routing.schedule == "constant" and routing.off_after >= 1 and "/" not in config.route
    # A schedule is smooth: a thousand points of it are its mean.
    points = 1 if plain else min(steps, 1000)
    per_image = sum(routes.macs(i / points) for i in range(points)) / points
    return per_image * config.train.batch * steps


def budget(way: str) -> Budget | None:
    """Return what gives a cell its steps, None for equal steps.

    Raises:
        SweepError: `way` is none of steps, flops, hours.
    """
    ways: dict[str, Budget | None] = {"steps": None, "flops": _flops, "hours": _hours}
    one_of("--compare-at", way, list(ways), SweepError)
    return ways[way]


def dense_of(words: Sequence[str]) -> Config:
    """Return the dense run that a run of these words is compared with."""
    return load([w for w in words if role(w.partition("=")[0]) != "routes"] + ["route=none"])


def _flops(config: Config, words: Sequence[str]) -> int:
    # A decoder or an aligned block is part of what a method costs, not of the dense run.
    dense = run_cost(dense_of(words)).macs_dense
    per_step = training_macs(config) / config.train.steps / config.train.batch
    return max(1, round(config.train.steps * dense / per_step))


def _hours(config: Config, words: Sequence[str]) -> int | None:
    dense = dense_of(words)
    if dense.name == config.name:
        return None
    found = []
    for one in (config, dense):
        measured = run_folder.speed(Path(config.paths.runs) / one.name)
        if measured is None:
            raise SweepError(
                f"--compare-at hours needs the measured speed of {one.name}: "
                "first run the same sweep for a few steps (train.steps=50); "
                "the longer runs go on from there"
            )
        found.append(measured)
    return max(1, round(config.train.steps * found[0] / found[1]))


def estimate(made: Plan, tflops: float | None) -> list[str]:
    """Return what the runs of a plan will cost, one line each and their sum.

    `tflops` is what one GPU reaches, in TFLOP/s; with None no hours are estimated.
    """
    lines, total = [], 0.0
    for run in made.runs:
        config = made.configs.get(run.name)
        if config is None:
            lines.append(f"{run.name}  {run.label}")
            continue
        # Forward and backward are three forwards; 2 FLOPs per MAC.
        flops = 6 * training_macs(config)
        total += flops
        cost = run_cost(config)
        dense = config.resolved_route == "none"
        share = "" if dense else f", {cost.speedup:.2f}x fewer per image than dense"
        lines.append(
            f"{run.name}  {run.label}  {config.train.steps} steps  {big(cost.params)} parameters  "
            f"{big(flops)} FLOPs{share}{_hours_text(flops, tflops)}"
        )
    return [*lines, f"together: {big(total)} FLOPs{_hours_text(total, tflops)}"] if total else lines


def _hours_text(flops: float, tflops: float | None) -> str:
    if tflops is None:
        return ""
    return f", about {flops / (tflops * 1e12) / 3600:.3g} GPU hours at {tflops:g} TFLOP/s"
