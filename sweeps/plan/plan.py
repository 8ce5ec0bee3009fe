"""Plans: the cells of a grid as runs, each composed and checked, with its name and its steps."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from experiments.config import Config, load
from experiments.runtime.console import shown_on_stderr
from routing.errors import UserError, one_of
from sweeps import SweepError
from sweeps.plan.cells import GridCell, expand
from sweeps.plan.command_output import check_writes
from sweeps.plan.cost import COMPARISONS, equal_cost_steps
from sweeps.plan.grid import Grid
from sweeps.plan.misfits import is_misfit
from sweeps.store.folder import Sweep
from sweeps.store.overrides import Typed, fill, format_overrides, format_value, runs_root
from sweeps.store.planned_run import PARENT, PlannedRun, values_of


@dataclass
class Plan:
    """The runs of a grid at a scale.

    Attributes:
        root: Folder of the run folders.
        configs: Configurations of the runs that train, by name.
        waiting: Runs that start when a parent is done: label, and the parent's name.
        left_out: Cells that do not fit: label and reason.
    """

    grid: Grid
    scale: str
    root: Path
    runs: list[PlannedRun] = field(default_factory=list)
    configs: dict[str, Config] = field(default_factory=dict)
    waiting: list[tuple[str, str]] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)

    @property
    def sweep(self) -> Sweep:
        """The folder of the grid in the folder of runs."""
        return Sweep(self.root, self.grid.name)

    def notes(self) -> list[str]:
        """Return a line for each cell that is left out, and each run that waits for another."""
        lines = [f"left out: {label} ({reason})" for label, reason in self.left_out]
        for label, parent in self.waiting:
            lines.append(f"waits for {parent}: {label}")
        return lines


def make_plan(
    grid: Grid,
    scale: str = "tiny",
    user: Mapping[str, Sequence[Typed]] | None = None,
    compare_at: str = "steps",
    check: Callable[[Config, PlannedRun], None] | None = None,
) -> Plan:
    """Compose and check every cell of a grid at a scale, with a user's overrides by key.

    `compare_at` is what is equal for each cell and its dense run: steps or flops. `check` is
    called with each configuration and its run before the next is composed, so that a large grid
    fails at its first cell.

    Raises:
        SweepError: A cell cannot be composed, or two cells are the same run at this scale.
    """
    one_of("--compare-at", compare_at, COMPARISONS, SweepError)
    plan = Plan(grid, scale, runs_root(user or {}))
    planned: dict[int, PlannedRun] = {}
    cells: dict[str, GridCell] = {}  # by run folder, or by name of a command
    all_cells = expand(grid, scale, user)
    with shown_on_stderr("checking the runs", len(all_cells)) as display:
        for index, cell in enumerate(all_cells):
            display.part = index / len(all_cells)
            parent = None if cell.parent is None else planned.get(cell.parent)
            if cell.parent is not None and parent is None:
                plan.left_out.append((cell.label, "what it starts from is left out"))
                continue
            waits = parent is not None and not parent.finished
            if cell.stage.trains:
                run = _plan_training(plan, cell, parent, compare_at)
            else:
                run = _plan_command(plan, cell, parent)
            if run is None:
                continue
            if parent is not None and waits:
                plan.waiting.append((cell.label, parent.name))
            if check is not None and run.name in plan.configs:
                check(plan.configs[run.name], run)
            key = run.folder if run.trains else run.name
            if key in cells:
                raise _same_run(plan, run, cells[key], cell)
            cells[key] = cell
            planned[index] = run
            plan.runs.append(run)
    if not plan.runs:
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
    """Plan a cell that trains; None if it is left out because it does not fit.

    A run whose arguments have its parent's folder is named after its cell. Before the parent is
    done it is composed without its initial weights, which are all that its configuration lacks.
    """
    folders = {"parent": parent.folder} if parent and parent.finished else {}
    overrides = {key: fill(value, folders) for key, value in cell.overrides.items()}
    arguments = format_overrides({**overrides, "paths.runs": str(plan.root)})
    deferred = any(PARENT in text for text in arguments)
    try:
        config = load(_without_parent(arguments))
        steps = equal_cost_steps(config, _without_parent(arguments), compare_at)
        if steps != config.train.steps:
            arguments = [text for text in arguments if not text.startswith("train.steps=")]
            arguments.append(f"train.steps={steps}")
            config = load(_without_parent(arguments))
    except UserError as error:
        if is_misfit(error, cell.stage.fits):
            plan.left_out.append((cell.label, str(error)))
            return None
        raise SweepError(f"{cell.label or 'the cell'}: {error}") from None
    name, unfilled = config.name, format_overrides(cell.overrides)
    if parent and any(PARENT in text for text in unfilled):
        # Like the name of a run folder, but without the weights, which may change.
        lasting = [text for text in unfilled if PARENT in text]
        name = _call_name(cell, [load(_without_parent(unfilled)).name, *lasting], parent)
    plan.configs[name] = config
    folder = plan.root / (name if deferred else config.name)
    run = _planned_run(plan, cell, name, arguments, str(folder), steps)
    return replace(run, parent=parent.name if parent else "", deferred=deferred)


def _without_parent(arguments: Sequence[str]) -> list[str]:
    """Return arguments that can be composed before there is a parent."""
    texts = []
    for text in arguments:
        if PARENT not in text:
            texts.append(text)
        elif text.startswith("init="):
            texts.append("init=null")  # a preset may require it
    return texts


def _call_name(cell: GridCell, arguments: Sequence[str], parent: PlannedRun | None) -> str:
    call = json.dumps([cell.stage.entry, arguments, parent.name if parent else None])
    return f"{cell.stage.name}-{hashlib.sha256(call.encode()).hexdigest()[:12]}"


def _plan_command(plan: Plan, cell: GridCell, parent: PlannedRun | None) -> PlannedRun:
    """Plan a cell of another command; `{out}` in its arguments is a file named after the run."""
    deferred = parent is not None and parent.deferred
    folders = {"parent": parent.folder} if parent and not deferred else {}
    arguments = _command_arguments(plan, cell, folders)
    lasting = arguments
    if parent and parent.is_named_after_cell:
        lasting = _command_arguments(plan, cell, {})
    name = _call_name(cell, lasting, parent)
    output = plan.sweep.path / "outputs" / name
    arguments = [fill(argument, {"out": str(output)}) for argument in arguments]
    try:
        check_writes(cell.stage.entry, arguments, str(output), [PARENT, str(plan.root)])
    except UserError as error:
        raise SweepError(f"grid {plan.grid.name}, {cell.label}: {error}") from None
    run = _planned_run(plan, cell, name, arguments, parent.folder if parent else "", None)
    return replace(run, parent=parent.name if parent else "", deferred=deferred)


def _command_arguments(plan: Plan, cell: GridCell, folders: Mapping[str, str]) -> list[str]:
    """Fill `{runs}`, `{key}` and `folders` into a command's arguments; other keys follow them."""
    texts, others = {"runs": str(plan.root)}, {}
    for key, value in cell.overrides.items():
        texts[key] = format_value(value).strip("'\"")
        if not any(f"{{{key}}}" in argument for argument in cell.stage.args):
            others[key] = fill(value, folders)
    arguments = [fill(argument, {**texts, **folders}) for argument in cell.stage.args]
    return arguments + format_overrides(others)


def _planned_run(
    plan: Plan, cell: GridCell, name: str, arguments: list[str], folder: str, steps: int | None
) -> PlannedRun:
    earlier = [run.name for run in plan.runs if run.stage == cell.stage.after]
    varies = {key: format_value(value) for key, value in cell.varies.items()}
    return PlannedRun(
        name=name,
        stage=cell.stage.name,
        label=cell.label,
        entry=cell.stage.entry,
        args=arguments,
        trains=cell.stage.trains,
        folder=folder,
        steps=steps,
        varies=varies,
        values=values_of(arguments) | varies,
        after=earlier,
        # Its output has its name, wherever `{out}` stands in its arguments.
        has_output=any(str(Path("outputs", name)) in argument for argument in arguments),
        cluster=dict(cell.cluster),
    )
