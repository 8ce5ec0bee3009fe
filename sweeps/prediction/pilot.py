"""The comparisons of a grid, dense against routed, and the grid of their pilot runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.config import Config, load, role
from routing.errors import UserError, require
from sweeps import SweepError
from sweeps.plan.cells import GridCell, UserValues, expand
from sweeps.plan.cost import training_macs
from sweeps.plan.grid import Grid
from sweeps.plan.misfits import is_misfit
from sweeps.store.overrides import format_overrides, without

# How many times the held-out loss is logged on the way of a dense pilot run.
LOGGED_POINTS = 10
# A routed pilot run gets this multiple of the dense one's multiply-adds: with s*m up to it, the
# routed run reaches the dense run's last loss.
ROUTED_LENGTH = 1.25
# A pilot sets these itself.
_SET_BY_PILOT = ("seed", "train.steps", "paths.runs")


@dataclass(frozen=True)
class PilotPair:
    """A routed cell of a grid and its dense counterpart, for any seed.

    Attributes:
        label: What distinguishes the routed cell from others of the grid.
        dense: Overrides of the dense run.
        routed: Overrides of the routed run.
        full_steps: Steps of a full dense run.
        m: Multiply-adds per step, routed over dense, of the whole schedule of the route.
        cluster: Keys of the cluster file that the grid changes for the routed cell.
    """

    label: str
    dense: Mapping[str, Any]
    routed: Mapping[str, Any]
    full_steps: int
    m: float
    cluster: Mapping[str, Any] = field(default_factory=dict)

    def names(self, seed: int) -> tuple[str, str]:
        """Return the names of the run folders with a seed: dense, routed."""
        dense = load(format_overrides({**self.dense, "seed": seed}))
        return dense.name, load(format_overrides({**self.routed, "seed": seed})).name


def comparisons(grid: Grid, scale: str, user: UserValues) -> list[PilotPair]:
    """Return a grid's routed cells, each with its dense run; seeds are not distinguished.

    N, the steps of a full dense run, are those of the grid's dense cell, else the routed cell's.
    Only runs that train from scratch count.

    Raises:
        SweepError: The grid has no such routed run, or its runs end with a schedule.
    """
    routed_cells: dict[str, tuple[GridCell, Config]] = {}
    dense_steps: dict[str, int] = {}
    for cell in expand(grid, scale, user):
        if not cell.stage.trains or cell.stage.of is not None:
            continue
        config = _config_of(cell)
        if config is None:
            continue
        require(
            config.train.schedule == "constant",
            f"grid {grid.name}: train.schedule={config.train.schedule}: expected constant, since "
            "the losses on the way of a decayed run are not those of shorter runs",
            SweepError,
        )
        if config.resolved_route == "none":
            dense_steps[config.name] = config.train.steps
        else:
            routed_cells.setdefault(config.name, (cell, config))
    require(
        routed_cells,
        f"grid {grid.name}: expected a routed run that trains from scratch",
        SweepError,
    )
    results = []
    for cell, config in routed_cells.values():
        routed = without(cell.overrides, _SET_BY_PILOT)
        # A decoder or an aligned block belongs to the route, not to the dense run.
        dense = {key: value for key, value in routed.items() if role(key) != "routes"}
        dense["route"] = "none"
        dense_config = load(format_overrides(dense))
        m = training_macs(config) / config.train.steps
        m /= training_macs(dense_config) / dense_config.train.steps
        label = " ".join(format_overrides(without(cell.varies, _SET_BY_PILOT)))
        full_steps = dense_steps.get(dense_config.name, config.train.steps)
        label = label or f"route={config.resolved_route}"
        results.append(PilotPair(label, dense, routed, full_steps, m, cell.cluster))
    return results


def _config_of(cell: GridCell) -> Config | None:
    """Return the configuration of a cell without its seed; None if the grid leaves it out."""
    try:
        return load(format_overrides(without(cell.overrides, ("seed", "paths.runs"))))
    except UserError as error:
        if is_misfit(error, cell.stage.fits):
            return None
        raise SweepError(f"{cell.label or 'the cell'}: {error}") from None


def pilot_root(root: Path, grid: Grid) -> Path:
    """Return the folder of a grid's pilot runs, hidden so that no table includes them."""
    return root / ".pilots" / grid.name


def logged_on_the_way(pairs: Sequence[PilotPair], steps: int) -> list[PilotPair]:
    """Return the comparisons with the scores of a pilot of so many dense steps.

    What is scored is part of a run's identity, and so of its name.
    """
    scores = {"eval.metrics": ["heldout_loss"], "eval.every": steps // LOGGED_POINTS}
    results = []
    for pair in pairs:
        dense, routed = {**pair.dense, **scores}, {**pair.routed, **scores}
        results.append(replace(pair, dense=dense, routed=routed))
    return results


def pilot_grid(grid: Grid, pairs: Sequence[PilotPair], steps: int, seeds: Sequence[int]) -> Grid:
    """Return the grid of the pilot runs: every dense run once, and every routed one.

    `pairs` are what `logged_on_the_way` returns. Dense runs get `steps`, a routed one as many
    multiply-adds and a quarter more.
    """
    every = steps // LOGGED_POINTS
    cells: dict[str, dict[str, Any]] = {}
    for pair in pairs:
        # Both end at a logged step.
        routed_steps = math.ceil(ROUTED_LENGTH * steps / pair.m / every) * every
        dense_name, routed_name = pair.names(seeds[0])
        cells[dense_name] = {**pair.dense, "train.steps": every * LOGGED_POINTS}
        cells[routed_name] = {**pair.routed, "train.steps": routed_steps}
        for name in (dense_name, routed_name):
            cells[name]["cluster"] = dict(pair.cluster)
    rows = [without(cell, ("scale",)) for cell in cells.values()]  # the scale is typed
    raw = {"title": f"Pilot of {grid.name}", "cells": rows, "seeds": list(seeds)}
    return Grid(f"{grid.name}_pilot", raw, grid.path, grid.commands)
