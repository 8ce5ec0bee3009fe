"""From cells to runs: each composed and checked, its name known, its cost and its steps (no torch).

At equal FLOPs a routed run gets `steps * dense / routed` steps (forward MACs of one image; backward
is twice the forward for both; what REPA's frozen encoder adds is not counted). At equal hours it is
`steps * speed / speed of the dense run`, from speeds that runs measured.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.config import Config, PathsConfig, role
from experiments.config import load as load_config
from experiments.config.routes import TrainingRoutes, run_cost
from experiments.data.data_options import ShapeError
from experiments.runtime import run_folder
from experiments.runtime.console import big
from routing.errors import UserError, one_of
from routing.route import RouteError
from sweeps import SweepError
from sweeps.planning.grid import Grid, GridCell, expand
from sweeps.planning.overrides import KEY, Typed, fill, only, show


@dataclass(frozen=True)
class PlannedRun:
    """One job of a sweep, ready to be submitted; plain values only, so it can stand in a file."""

    name: str
    stage: str
    label: str
    entry: str
    args: list[str]
    trains: bool
    folder: str  # the run folder; of another command: that of its parent, or ""
    steps: int | None
    varies: Mapping[str, str] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Whether its run folder holds a finished run of as many steps."""
        return run_folder.finished(self.folder, self.steps)

    @property
    def saved_step(self) -> int:
        """The step that survives a kill now; 0 for a command that saves nothing."""
        return run_folder.saved_step(self.folder) if self.trains else 0

    @property
    def parent_step(self) -> int | None:
        """The step at which the run of `folder` has ended; None if it has not, or there is none."""
        step = run_folder.read(Path(self.folder) / "summary.json").get("step")
        return step if self.folder and isinstance(step, int) else None

    @property
    def values(self) -> dict[str, str]:
        """Its overrides by key, also those that its command takes in other words."""
        words = (word.partition("=") for word in self.args)
        return {k: v for k, equals, v in words if equals and KEY.match(k)} | dict(self.varies)


@dataclass
class Plan:
    """What a grid means at a scale: runs, cells that wait for a parent, cells left out."""

    grid: Grid
    scale: str
    root: Path  # the folder of run folders
    runs: list[PlannedRun] = field(default_factory=list)
    configs: dict[str, Any] = field(default_factory=dict)
    # (label, name of the parent or reason)
    waiting: list[tuple[str, str]] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)

    def notes(self) -> list[str]:
        """Return a line for each cell that waits or is left out."""
        waiting = [f"waiting: {cell} (for {why}; launch again then)" for cell, why in self.waiting]
        return [f"left out: {cell} ({why})" for cell, why in self.left_out] + waiting


def plan(
    grid: Grid, scale: str = "tiny", user: Mapping[str, Sequence[Typed]] | None = None,
    compare_at: str = "steps", check: Callable[[Config], None] | None = None,
) -> Plan:  # fmt: skip
    """Compose and check every cell of a grid at a scale, with a user's overrides by key.

    `compare_at` says of what each cell gets as much as its dense run: steps, flops or hours.
    `check` is called with each configuration, before the next is composed: a large grid takes
    minutes, and what its first cell lacks is said at once.

    Raises:
        SweepError: A cell cannot be composed, or two cells are the same run at this scale.
    """
    one_of("--compare-at", compare_at, ("steps", "flops", "hours"), SweepError)
    made = Plan(grid, scale, runs_root(user or {}))
    planned: dict[int, PlannedRun] = {}
    seen: dict[str, GridCell] = {}
    for index, cell in enumerate(expand(grid, scale, user)):
        parent = None if cell.parent is None else planned.get(cell.parent)
        if cell.parent is not None and (parent is None or not parent.finished):
            why = parent.name if parent else "its parent, which is waiting or left out"
            made.waiting.append((cell.label, why))
            continue
        train = cell.stage.trains
        run = _train(made, cell, parent, compare_at) if train else _command(made, cell, parent)
        if run is None:
            continue
        if check is not None and run.name in made.configs:
            check(made.configs[run.name])
        if (first := seen.setdefault(run.name, cell)) is not cell:
            config = made.configs.get(run.name)
            about = f", route {config.resolved_route} at depth {config.depth}" if config else ""
            raise SweepError(
                f"grid {grid.name}: cells coincide at scale {scale}, '{first.label}' and "
                f"'{cell.label}' are one run{about}; a dense run does not depend on how tokens are "
                "routed, and no name holds keys that only report, such as train.steps: launch once "
                "for each"
            )
        planned[index] = run
        made.runs.append(run)
    if not made.runs and not made.waiting:
        reasons = "; ".join(f"{label}: {why}" for label, why in made.left_out)
        raise SweepError(f"grid {grid.name}: no cell fits at scale {scale} ({reasons})")
    return made


def runs_root(user: Mapping[str, Sequence[Typed]]) -> Path:
    """Return the absolute folder of run folders, as typed in `paths.runs` or by default."""
    typed = only("paths.runs", user.get("paths.runs", [Typed(PathsConfig().runs)]))
    return Path(typed).expanduser().absolute()


def _words(cell: GridCell, parent: PlannedRun | None, **more: str) -> list[str]:
    places = {"parent": parent.folder} if parent else {}
    return [f"{k}={show(fill(v, places))}" for k, v in {**cell.overrides, **more}.items()]


def _train(
    made: Plan, cell: GridCell, parent: PlannedRun | None, compare_at: str
) -> PlannedRun | None:
    words = _words(cell, parent, **{"paths.runs": str(made.root)})
    try:
        config = load_config(words)
        steps = _steps(config, words, compare_at)
        if steps != config.train.steps:
            words = [w for w in words if not w.startswith("train.steps=")]
            words.append(f"train.steps={steps}")
            config = load_config(words)
    except UserError as error:
        fits = {"route": RouteError, "data": ShapeError}
        if isinstance(error, tuple(fits[kind] for kind in cell.stage.fits)):
            made.left_out.append((cell.label, str(error)))
            return None
        raise SweepError(f"{cell.label or 'the cell'}: {error}") from None
    made.configs[config.name] = config
    return PlannedRun(
        config.name, cell.stage.name, cell.label, cell.stage.entry, words, True,
        str(made.root / config.name), steps, {k: show(v) for k, v in cell.varies.items()},
    )  # fmt: skip


def _command(made: Plan, cell: GridCell, parent: PlannedRun | None) -> PlannedRun:
    """Fill `{parent}`, `{out}` and `{key}` in a command's arguments; other keys follow as words."""
    texts = {key: show(value).strip("'\"") for key, value in cell.overrides.items()}
    used = {key for key in texts for arg in cell.stage.args if f"{{{key}}}" in arg}
    if parent:
        texts["parent"] = parent.folder
    args = [fill(arg, texts) for arg in cell.stage.args]
    args += [w for w in _words(cell, parent) if w.split("=", 1)[0] not in used]
    text = json.dumps([cell.stage.entry, args, parent.name if parent else None])
    name = f"{cell.stage.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    out = made.root / ".sweeps" / made.grid.name / "outputs" / name
    return PlannedRun(
        name, cell.stage.name, cell.label, cell.stage.entry,
        [fill(arg, {"out": str(out)}) for arg in args], False,
        parent.folder if parent else "", None,
        {k: show(v) for k, v in cell.varies.items()},
    )  # fmt: skip


# --- cost -----------------------------------------------------------------------------------------


def training_macs(config: Config) -> float:
    """Return the forward MACs of a whole run, schedules of the route included."""
    routes, steps = TrainingRoutes(config), config.train.steps
    routing = config.routing
    plain = routing.schedule == "constant" and routing.off_after >= 1 and "/" not in config.route
    # A schedule is smooth: a thousand points of it are its mean.
    points = 1 if plain else min(steps, 1000)
    per_image = sum(routes.macs(routes.schedule.at(i / points)) for i in range(points)) / points
    return per_image * config.train.batch * steps


def _steps(config: Config, words: Sequence[str], compare_at: str) -> int:
    """Return the steps of a run that costs as much as its dense run, or takes as long."""
    steps = config.train.steps
    if compare_at == "steps":
        return steps
    # A decoder or an aligned block is part of what a method costs, not of the dense run.
    plain = [word for word in words if role(word.partition("=")[0]) != "routes"]
    dense = load_config([*plain, "route=none"])
    if compare_at == "flops":
        per_image = training_macs(config) / steps / config.train.batch
        return max(1, round(steps * run_cost(dense).macs_dense / per_image))
    if dense.name == config.name:
        return steps
    speeds = []
    for one in (config, dense):
        measured = run_folder.speed(Path(config.paths.runs) / one.name)
        if measured is None:
            raise SweepError(
                f"--compare-at hours needs the measured speed of {one.name}: first run the same "
                "sweep for a few steps (train.steps=50); the longer runs go on from there"
            )
        speeds.append(measured)
    return max(1, round(steps * speeds[0] / speeds[1]))


def estimate(made: Plan, tflops: float | None) -> list[str]:
    """Return what the runs of a plan will cost, one line each and their sum.

    `tflops` is what one GPU reaches, in TFLOP/s; with None no hours are estimated.
    """

    def said(flops: float, share: str = "") -> str:
        text = f"{big(flops)} FLOPs{share}"
        if tflops is not None:
            hours = flops / (tflops * 1e12) / 3600
            text += f", about {hours:.3g} GPU hours at {tflops:g} TFLOP/s"
        return text

    lines, total = [], 0.0
    for run in made.runs:
        words = [run.name, run.label]
        if (config := made.configs.get(run.name)) is not None:
            # Forward and backward are three forwards; 2 FLOPs per MAC.
            flops, cost = 6 * training_macs(config), run_cost(config)
            total += flops
            dense = config.resolved_route == "none"
            share = "" if dense else f", {cost.speedup:.2f}x fewer per image than dense"
            words += [f"{run.steps} steps", f"{big(cost.params)} parameters", said(flops, share)]
        lines.append("  ".join(words))
    return [*lines, f"together: {said(total)}"] if total else lines
