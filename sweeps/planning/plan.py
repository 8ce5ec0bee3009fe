"""From cells to runs: each composed and checked, coinciding ones refused, names known."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from routing.errors import UserError
from sweeps.errors import SweepError
from sweeps.jobs import run_folder
from sweeps.planning.grid import Cell, Grid, expand
from sweeps.planning.overrides import Typed, show
from sweeps.planning.stages import entries


@dataclass(frozen=True)
class Run:
    """One job of a sweep, ready to be submitted; plain values only, so it can stand in a file."""

    name: str
    stage: str
    label: str
    entry: str
    args: tuple[str, ...]
    trains: bool
    folder: str  # the run folder; of another command: that of its parent, or ""
    steps: int | None
    varies: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able values; `from_dict` inverts it."""
        return {**self.__dict__, "args": list(self.args), "varies": dict(self.varies)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Run:
        """Build a run from the values in a sweep's file.

        Raises:
            SweepError: They are not what `to_dict` writes.
        """
        try:
            known = {k: values[k] for k in cls.__dataclass_fields__}
            texts = [known[k] for k in ("name", "stage", "label", "entry", "folder")]
            texts += [*known["args"], *known["varies"], *known["varies"].values()]
            good = all(isinstance(text, str) for text in texts)
            good = good and (known["steps"] is None or type(known["steps"]) is int)
            # The file of a sweep names no code that a grid could not name.
            good = good and known["entry"] in entries().values()
        except (KeyError, TypeError, AttributeError):
            good = False
        if not good:
            raise SweepError("a run in the sweep's file is damaged; launch the grid again")
        return cls(**{**known, "args": tuple(known["args"])})


@dataclass
class Plan:
    """What a grid means at a scale: runs, cells that wait for a parent, cells left out."""

    grid: Grid
    scale: str
    root: Path  # the folder of run folders
    runs: list[Run] = field(default_factory=list)
    configs: dict[str, Any] = field(default_factory=dict)
    waiting: list[tuple[str, str]] = field(
        default_factory=list
    )  # (label, name of the parent or why)
    left_out: list[tuple[str, str]] = field(default_factory=list)  # (label, reason)


Budget = Callable[[Any, Sequence[str]], int | None]


def plan(
    grid: Grid,
    scale: str = "tiny",
    user: Mapping[str, Sequence[Typed]] | None = None,
    *,
    budget: Budget | None = None,
    root: Path | None = None,
    done: Callable[[Run], bool] | None = None,
) -> Plan:
    """Compose and check every cell of a grid.

    Args:
        grid: From `grid.load`.
        scale: tiny, small or paper.
        user: Overrides by key, each with one or several values.
        budget: Gives a cell's number of steps from its config and overrides; None keeps the
        config's own.
        root: Folder of run folders; default: `paths.runs` of the overrides or of the configuration.
        done: Whether a parent is finished; default: looks into its run folder.

    Raises:
        SweepError: A cell cannot be composed, or two cells are the same run at this scale.
    """
    made = Plan(grid, scale, (root or runs_root(user)).expanduser().absolute())
    finished = done or (lambda run: run_folder.finished(run.folder, run.steps))
    seen: dict[str, Cell] = {}
    planned: dict[int, Run] = {}
    for index, cell in enumerate(expand(grid, scale, user)):
        parent = planned.get(cell.parent) if cell.parent is not None else None
        if cell.parent is not None and parent is None:
            made.waiting.append((cell.label, "its parent, which is waiting or left out"))
            continue
        if parent is not None and not finished(parent):
            made.waiting.append((cell.label, parent.name))
            continue
        run = _train(made, cell, parent, budget) if cell.trains else _command(made, cell, parent)
        if run is None:
            continue
        if run.name in seen:
            raise SweepError(
                _coincide(grid, scale, seen[run.name], cell, made.configs.get(run.name))
            )
        seen[run.name] = cell
        planned[index] = run
        made.runs.append(run)
    if not made.runs and not made.waiting:
        reasons = "; ".join(f"{label}: {why}" for label, why in made.left_out)
        raise SweepError(f"grid {grid.name}: no cell fits at scale {scale} ({reasons})")
    return made


def runs_root(user: Mapping[str, Sequence[Typed]] | None = None) -> Path:
    """Return the folder of run folders that `paths.runs` names, as typed or by default."""
    from experiments.config.schema import PathsConfig

    if user and "paths.runs" in user:
        return Path(user["paths.runs"][0].text.strip("'\""))
    return Path(PathsConfig().runs)


def _words(made: Plan, cell: Cell, parent: Run | None) -> list[str]:
    words = (
        {**cell.overrides, "paths.runs": str(made.root)} if cell.trains else dict(cell.overrides)
    )
    return [f"{k}={show(_filled(v, parent))}" for k, v in words.items()]


def _filled(value: Any, parent: Run | None) -> Any:
    if parent is None or not isinstance(value, str):
        return value
    return value.replace("{parent}", parent.folder)


def _train(made: Plan, cell: Cell, parent: Run | None, budget: Budget | None) -> Run | None:
    from experiments.config import load
    from experiments.data.data_options import ShapeError
    from routing.route import RouteError

    words = _words(made, cell, parent)
    try:
        config = load(words)
        steps = budget(config, words) if budget else None
        if steps is not None and steps != config.train.steps:
            words = [w for w in words if not w.startswith("train.steps=")] + [
                f"train.steps={steps}"
            ]
            config = load(words)
    except (RouteError, ShapeError) as error:
        if ("route" if isinstance(error, RouteError) else "data") not in cell.fits:
            raise SweepError(f"{cell.label or 'the cell'}: {error}") from None
        made.left_out.append((cell.label, str(error)))
        return None
    except UserError as error:
        raise SweepError(f"{cell.label or 'the cell'}: {error}") from None
    run = Run(
        config.name, cell.stage, cell.label, cell.entry, tuple(words), True,
        str(made.root / config.name), config.train.steps,
        {k: show(v) for k, v in cell.varies.items()},
    )  # fmt: skip
    made.configs[run.name] = config
    return run


def _command(made: Plan, cell: Cell, parent: Run | None) -> Run:
    """Fill `{parent}`, `{out}` and `{key}` in a command's arguments; other keys follow as words."""
    used = {key for key in cell.overrides for arg in cell.args if f"{{{key}}}" in arg}
    args = []
    for arg in cell.args:
        for key in used:
            arg = arg.replace(f"{{{key}}}", show(cell.overrides[key]).strip('"'))
        args.append(str(_filled(arg, parent)))
    args += [w for w in _words(made, cell, parent) if w.split("=", 1)[0] not in used]
    text = json.dumps([cell.entry, args, parent.name if parent else None])
    name = f"{cell.stage}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    out = made.root / ".sweeps" / made.grid.name / "outputs" / name
    filled = tuple(a.replace("{out}", str(out)) for a in args)
    return Run(
        name, cell.stage, cell.label, cell.entry, filled, False,
        parent.folder if parent else "", None, {k: show(v) for k, v in cell.varies.items()},
    )  # fmt: skip


def _coincide(grid: Grid, scale: str, first: Cell, second: Cell, config: Any) -> str:
    keys = [k for k in {**first.varies, **second.varies} if k in first.varies or k in second.varies]
    differ = [
        f"{k}={show(first.varies.get(k))} and {k}={show(second.varies.get(k))}"
        for k in keys
        if show(first.varies.get(k)) != show(second.varies.get(k))
    ]
    if not differ:
        what = f"'{first.label}' stands twice"
    else:
        what = f"{' with '.join(differ)} make one and the same run"
    why = ""
    if config is not None and any(d.startswith("route=") for d in differ):
        why = f": both are route {config.resolved_route} at depth {config.depth}"
    elif config is not None and config.resolved_route == "none":
        why = ": a dense run does not depend on how tokens are routed"
    return f"grid {grid.name}: cells coincide at scale {scale}, {what}{why}"


def with_steps(run: Run, steps: int) -> Run:
    """Return the run with another number of steps."""
    args = [a for a in run.args if not a.startswith("train.steps=")] + [f"train.steps={steps}"]
    return replace(run, args=tuple(args), steps=steps)
