"""Plans: the cells of a grid as runs, each composed and checked, with its name and its steps."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from experiments.config import Config
from routing.errors import UserError, one_of
from sweeps import SweepError
from sweeps.cells import GridCell, expand
from sweeps.composition import MISFITS, load_config
from sweeps.cost import COMPARISONS, equal_cost_steps
from sweeps.grid import Grid
from sweeps.overrides import Typed, fill, format_overrides, format_value, runs_root
from sweeps.planned_run import PlannedRun


@dataclass
class Plan:
    """The runs of a grid at a scale.

    Attributes:
        root: Folder of the run folders.
        configs: Configurations of the runs that train, by name.
        waiting: Cells that wait for a parent: label, and the parent's name or a reason.
        left_out: Cells that do not fit: label and reason.
    """

    grid: Grid
    scale: str
    root: Path
    runs: list[PlannedRun] = field(default_factory=list)
    configs: dict[str, Config] = field(default_factory=dict)
    waiting: list[tuple[str, str]] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)

    def notes(self) -> list[str]:
        """Return a line for each cell that waits or is left out."""
        lines = [f"left out: {label} ({reason})" for label, reason in self.left_out]
        for label, parent in self.waiting:
            lines.append(f"waiting: {label} (for {parent}; launch again then)")
        return lines


def make_plan(
    grid: Grid,
    scale: str = "tiny",
    user: Mapping[str, Sequence[Typed]] | None = None,
    compare_at: str = "steps",
    check: Callable[[Config], None] | None = None,
) -> Plan:
    """Compose and check every cell of a grid at a scale, with a user's overrides by key.

    Args:
        grid: The grid.
        scale: tiny, small or paper.
        user: Values by key, as typed; `paths.runs` is the folder of the run folders.
        compare_at: What each cell gets as much of as its dense run: steps, flops or hours.
        check: Called with each configuration before the next is composed, so that a large grid
            fails at its first cell.

    Raises:
        SweepError: A cell cannot be composed, or two cells are the same run at this scale.
    """
    one_of("--compare-at", compare_at, COMPARISONS, SweepError)
    plan = Plan(grid, scale, runs_root(user or {}))
    planned: dict[int, PlannedRun] = {}
    cells: dict[str, GridCell] = {}
    for index, cell in enumerate(expand(grid, scale, user)):
        parent = None if cell.parent is None else planned.get(cell.parent)
        if cell.parent is not None and (parent is None or not parent.finished):
            name = parent.name if parent else "its parent, which is waiting or left out"
            plan.waiting.append((cell.label, name))
            continue
        if cell.stage.trains:
            run = _plan_training(plan, cell, parent, compare_at)
        else:
            run = _plan_command(plan, cell, parent)
        if run is None:
            continue
        if check is not None and run.name in plan.configs:
            check(plan.configs[run.name])
        if run.name in cells:
            raise _same_run(plan, run, cells[run.name], cell)
        cells[run.name] = cell
        planned[index] = run
        plan.runs.append(run)
    if not plan.runs and not plan.waiting:
        reasons = "; ".join(f"{label}: {reason}" for label, reason in plan.left_out)
        raise SweepError(f"grid {grid.name}: no cell fits at scale {scale} ({reasons})")
    return plan


def _same_run(plan: Plan, run: PlannedRun, first: GridCell, second: GridCell) -> SweepError:
    config = plan.configs.get(run.name)
    route = f", route {config.resolved_route} at depth {config.depth}" if config else ""
    return SweepError(
        f"grid {plan.grid.name}: cells coincide at scale {plan.scale}, '{first.label}' and "
        f"'{second.label}' are one run{route}; a dense run does not depend on how tokens are "
        "routed, and names omit keys that only affect reports, such as train.steps: launch once "
        "for each"
    )


def _plan_training(
    plan: Plan, cell: GridCell, parent: PlannedRun | None, compare_at: str
) -> PlannedRun | None:
    """Plan a cell that trains; None if it is left out because it does not fit."""
    arguments = _arguments(cell, parent, {"paths.runs": str(plan.root)})
    try:
        config = load_config(arguments)
        steps = equal_cost_steps(config, arguments, compare_at)
        if steps != config.train.steps:
            arguments = [text for text in arguments if not text.startswith("train.steps=")]
            arguments.append(f"train.steps={steps}")
            config = load_config(arguments)
    except UserError as error:
        if isinstance(error, tuple(MISFITS[kind] for kind in cell.stage.fits)):
            plan.left_out.append((cell.label, str(error)))
            return None
        raise SweepError(f"{cell.label or 'the cell'}: {error}") from None
    name = config.name
    plan.configs[name] = config
    return _planned_run(cell, name, arguments, str(plan.root / name), steps)


def _plan_command(plan: Plan, cell: GridCell, parent: PlannedRun | None) -> PlannedRun:
    """Plan a cell of another command.

    `{parent}`, `{out}` and `{key}` are filled into its arguments; other keys follow as overrides.
    """
    texts, in_arguments = {}, set()
    for key, value in cell.overrides.items():
        texts[key] = format_value(value).strip("'\"")
        if any(f"{{{key}}}" in argument for argument in cell.stage.args):
            in_arguments.add(key)
    if parent:
        texts["parent"] = parent.folder
    arguments = [fill(argument, texts) for argument in cell.stage.args]
    for argument in _arguments(cell, parent, {}):
        if argument.partition("=")[0] not in in_arguments:
            arguments.append(argument)
    call = json.dumps([cell.stage.entry, arguments, parent.name if parent else None])
    name = f"{cell.stage.name}-{hashlib.sha256(call.encode()).hexdigest()[:12]}"
    output = plan.root / ".sweeps" / plan.grid.name / "outputs" / name
    arguments = [fill(argument, {"out": str(output)}) for argument in arguments]
    return _planned_run(cell, name, arguments, parent.folder if parent else "", None)


def _arguments(cell: GridCell, parent: PlannedRun | None, fixed: Mapping[str, str]) -> list[str]:
    """Return a cell's overrides as arguments, with `{parent}` filled in and `fixed` ones set."""
    folders = {"parent": parent.folder} if parent else {}
    overrides = {key: fill(value, folders) for key, value in cell.overrides.items()}
    return format_overrides({**overrides, **fixed})


def _planned_run(
    cell: GridCell, name: str, arguments: list[str], folder: str, steps: int | None
) -> PlannedRun:
    return PlannedRun(
        name=name,
        stage=cell.stage.name,
        label=cell.label,
        entry=cell.stage.entry,
        args=arguments,
        trains=cell.stage.trains,
        folder=folder,
        steps=steps,
        varies={key: format_value(value) for key, value in cell.varies.items()},
    )
