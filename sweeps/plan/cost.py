"""What the runs of a sweep cost, and how many steps cost as much as a dense run.

At equal FLOPs a routed run gets `steps * dense / routed` steps (forward MACs of one image; backward
is twice the forward for both; REPA's frozen encoder is not counted).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from experiments.config import Config, load, role
from experiments.config.model import route_macs, run_cost
from experiments.runtime.console import big, shown_on_stderr
from experiments.runtime.memory import visible_gpus
from sweeps.store.planned_run import PlannedRun

COMPARISONS = ("steps", "flops")


def training_macs(config: Config) -> float:
    """Return the forward MACs of a whole run, schedules of the route included."""
    macs_on, steps = route_macs(config), config.train.steps
    routing = config.routing
    constant = routing.schedule == "constant" and routing.off_after >= 1 and "/" not in config.route
    # A schedule is smooth, so its mean over a thousand points is accurate.
    points = 1 if constant else min(steps, 1000)
    macs = 0.0
    for point in range(points):
        macs += macs_on(config.route_schedule.at(point / points))
    return macs / points * config.train.batch * steps


def equal_cost_steps(config: Config, arguments: Sequence[str], compare_at: str) -> int:
    """Return the steps of a run, composed from `arguments`, that costs as much as its dense run.

    `compare_at` is `steps` or `flops`; with `steps` the run keeps its own.
    """
    steps = config.train.steps
    if compare_at == "steps":
        return steps
    # A decoder or an aligned block is part of a method's cost, not of the dense run's.
    plain = [text for text in arguments if role(text.partition("=")[0]) != "routes"]
    dense = load([*plain, "route=none"])
    per_image = training_macs(config) / steps / config.train.batch
    return max(1, round(steps * run_cost(dense).macs_dense / per_image))


def estimate(
    runs: Sequence[PlannedRun],
    configs: Mapping[str, Config],
    tflops: float | None,
    kind: str = "slurm",
) -> list[str]:
    """Return what runs will cost, one line each and their sum; in hours if `tflops` are known.

    `tflops` is what one GPU reaches, or the CPU on a machine (`kind` other than slurm) without.
    """
    speed = None
    if tflops is not None:
        speed = (tflops, "GPU" if kind == "slurm" or visible_gpus() else "CPU")
    lines: list[str] = []
    total = 0.0
    with shown_on_stderr("counting their cost", len(runs)) as display:
        for run in runs:
            display.part = len(lines) / len(runs)
            columns = [run.name, run.label]
            config = configs.get(run.name)
            if config is not None:
                # Backward takes two forwards; 2 FLOPs per MAC.
                flops, cost = 6 * training_macs(config), run_cost(config)
                total += flops
                dense = config.resolved_route == "none"
                saving = "" if dense else f", {cost.speedup:.2f}x fewer per image than dense"
                columns += [f"{run.steps} steps", f"{big(cost.params)} parameters"]
                columns.append(_format_flops(flops, saving, speed))
            lines.append("  ".join(columns))
    return [*lines, f"together: {_format_flops(total, '', speed)}"] if total else lines


def _format_flops(flops: float, saving: str, speed: tuple[float, str] | None) -> str:
    text = f"{big(flops)} FLOPs{saving}"
    if speed is None:
        return text
    tflops, device = speed
    hours = flops / (tflops * 1e12) / 3600
    return f"{text}, about {hours:.3g} {device} hours at {tflops:g} TFLOP/s"
