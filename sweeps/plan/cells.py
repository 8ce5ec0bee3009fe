"""Cells of a grid: its stages multiplied out, with the user's overrides.

A cell is one of `cells` x `zip` x `axes`, once per seed. Seeds are the outermost loop, so that a
sweep that is cut short has complete tables of fewer seeds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from backbones.parsing import whole
from routing.errors import UserError, one_of, require, suggest
from sweeps import SweepError
from sweeps.plan.grid import MAX_CELLS, Grid, Rows, Stage
from sweeps.store.overrides import Typed, format_overrides, format_value, is_any_of, without

UserValues = Mapping[str, Sequence[Any]]
# Typed, like paths.runs, for a whole launch rather than for one stage.
PLAN_KEYS = ("scale", "cluster", "dry")


@dataclass(frozen=True)
class GridCell:
    """One run of a stage.

    Attributes:
        overrides: All overrides by key.
        varies: Those that distinguish it from other cells.
        changes: What its stage changes of the overrides of its parent, if it trains.
        parent: Index of the cell whose run this one starts from.
        cluster: Keys of the cluster file that its stage and its row of `cells` change.
    """

    stage: Stage
    overrides: Mapping[str, Any]
    varies: Mapping[str, Any]
    changes: Mapping[str, Any] = field(default_factory=dict)
    parent: int | None = None
    cluster: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What distinguishes the cell, as typed on a command line."""
        text = " ".join(format_overrides(self.varies))
        if self.changes:
            text += f" ({' '.join(format_overrides(self.changes))})"
        return text if self.stage.name == "train" else f"{self.stage.name}: {text}".rstrip(": ")


def expand(grid: Grid, scale: str = "tiny", user: UserValues | None = None) -> list[GridCell]:
    """Expand a grid at a scale (tiny, small or paper) to cells, which are not checked yet.

    A user's values apply to the first stage, those of a key `STAGE:key` to the stage of that name.
    They replace an axis (or `seed`) or select rows of `cells` and `zip`; several values of another
    key become a new axis, and a single one overrides every cell of the stage.

    Raises:
        SweepError: A value selects no row, the grid refuses the scale, or no cell is left.
    """
    user = user or {}
    cells: list[GridCell] = []
    try:
        stages = grid.stages(scale)
        by_stage = _by_stage(stages, user)
        for stage in stages:
            _add_cells(cells, _apply_user(stage, by_stage[stage.name]), scale, bool(user))
        require(cells, f"no cell is left at scale {scale} with these overrides", SweepError)
    except UserError as error:
        raise SweepError(f"grid {grid.name}: {error}") from None
    return cells


def _by_stage(stages: Sequence[Stage], user: UserValues) -> dict[str, dict[str, Sequence[Any]]]:
    """Return a user's values by stage and key.

    Raises:
        SweepError: There is no such stage, or a key belongs to the command of a later one.
    """
    names = [stage.name for stage in stages]
    by_stage: dict[str, dict[str, Sequence[Any]]] = {name: {} for name in names}
    for text, values in user.items():
        name, colon, key = text.rpartition(":")
        if colon:
            one_of(f"{text}: stage", name, names, SweepError)
            require(
                key.partition(".")[0] not in PLAN_KEYS and key != "paths.runs",
                f"{text}: expected without a stage: {key}=",
                SweepError,
            )
        else:
            name = names[0]
            for stage in stages[1:] if stages[0].trains else ():
                require(
                    stage.trains or key not in stage.set_keys() - stages[0].set_keys(),
                    f"{key}= is a key of stage {stage.name}: expected {stage.name}:{key}=",
                    SweepError,
                )
        if key == "paths.runs":  # of the plan; other commands have folders as arguments
            continue
        require(key not in by_stage[name], f"{key} of stage {name} is given twice", SweepError)
        by_stage[name][key] = values
    return by_stage


def _add_cells(cells: list[GridCell], stage: Stage, scale: str, has_overrides: bool) -> None:
    """Append a stage's cells, once for each of its parents among `cells`."""
    parents = _parents(cells, stage)
    # A user's overrides may have removed all parents.
    require(
        parents or has_overrides, f"stage {stage.name!r} has no parent at scale {scale}", SweepError
    )
    require(
        len(cells) + len(parents) * math.prod(map(len, stage.factors.values())) <= MAX_CELLS,
        f"stage {stage.name!r} makes more than {MAX_CELLS} cells: launch it in parts, with "
        "fewer values of its axes each",
        SweepError,
    )
    for parent in parents:
        base: dict[str, Any] = {"scale": Typed(scale)} if stage.trains else {}
        inherited: Mapping[str, Any] = {}
        if parent is not None:
            inherited = cells[parent].varies
            base |= cells[parent].overrides if stage.trains else {}
        changes = {}
        for key, value in stage.base.items() if base and parent is not None else ():
            if key != "init" and (key not in base or not is_any_of(value, [base[key]])):
                changes[key] = value
        for rows in itertools.product(*stage.factors.values()):
            varies: dict[str, Any] = {}
            for row in rows:
                varies.update(row)
            cluster = {**stage.cluster, **(varies.pop("cluster", None) or {})}
            if "seed" in varies:
                varies["seed"] = varies.pop("seed")  # last in labels
            overrides = {**base, **stage.base, **varies}
            varies = {**inherited, **varies}
            cells.append(GridCell(stage, overrides, varies, changes, parent, cluster))


def _parents(cells: Sequence[GridCell], stage: Stage) -> list[int | None]:
    """Return the indices of the cells that a stage starts from; [None] for a first stage."""
    if stage.of is None:
        return [None]
    parents: list[int | None] = []
    for index, cell in enumerate(cells):
        if cell.stage.name == stage.of and _matches(cell, stage.where):
            parents.append(index)
    return parents


def _matches(cell: GridCell, where: Mapping[str, Any]) -> bool:
    for key, value in where.items():
        if not is_any_of(cell.overrides.get(key), value if isinstance(value, list) else [value]):
            return False
    return True


def _apply_user(stage: Stage, user: UserValues) -> Stage:
    """Return the stage with a user's values for it."""
    base, factors = dict(stage.base), dict(stage.factors)
    for key, values in user.items():
        if key in factors:
            if key == "seed":
                values = [whole(format_value(value), "seed=", SweepError) for value in values]
            factors[key] = [{key: value} for value in values]
            continue
        table = _table_with(key, factors)
        if table is not None:
            # An option such as sampler.steps=5 is set in every row; backbone=... selects rows.
            if not _sets_option(key, values, factors[table]):
                factors[table] = _select_rows(key, values, factors[table])
                continue
            factors[table] = [without(row, [key]) for row in factors[table]]
        if len(values) > 1:
            base.pop(key, None)
            factors[key] = [{key: value} for value in values]
        else:
            base[key] = values[0]
    return replace(stage, base=base, factors=factors)


def _table_with(key: str, factors: Mapping[str, Rows]) -> str | None:
    for name in ("cells", "zip"):
        if any(key in row for row in factors[name]):
            return name
    return None


def _sets_option(key: str, values: Sequence[Any], rows: Rows) -> bool:
    """Return whether values are new ones of an option in rows, rather than a selection of rows.

    Raises:
        SweepError: They are neither: a name that no row has, or a mixture.
    """
    present = [row[key] for row in rows if key in row]
    new = [value for value in values if not is_any_of(value, present)]
    if new and ("." not in key or len(new) < len(values)):
        texts = list(dict.fromkeys(map(format_value, present)))
        suggestion = suggest(new[0], texts)
        if key == "route":
            suggestion = (
                f"; launch route_placement route={new[0]} for other routes, or add it to cells in "
                "a copy of the grid"
            )
        raise SweepError(
            f"{key}={new[0]}: no cell has it; expected one of {', '.join(texts)}{suggestion}"
        )
    return bool(new)


def _select_rows(key: str, values: Sequence[Any], rows: Rows) -> Rows:
    """Return the rows with one of the values, and those without the key, which fit all values."""
    return [row for row in rows if key not in row or is_any_of(row[key], values)]
