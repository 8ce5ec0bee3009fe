"""A grid: one YAML file per table or figure, expanded to cells.

docs/grids.md has every key with examples; in a file in Python, `commands` maps further commands to
`module:function` or to functions of the file. Cells are `cells x zip x axes`, once per seed; seeds
are the outermost loop, so a sweep that is cut short has whole tables of fewer seeds rather than a
part of one table.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import re
import runpy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.runtime.command import PACKAGES
from experiments.runtime.parsing import whole, yaml_of
from routing.errors import one_of, suggest
from sweeps import SweepError
from sweeps.planning.overrides import Typed, fill, fits, same, show

FOLDER = Path(__file__).parents[1] / "grids"
# Each is composed and checked before the first is submitted, ten a second.
MOST_CELLS = 10_000
SCALES = ("tiny", "small", "paper")
# What a cell may run, `module:function` by command. A grid in YAML may come from anywhere: it names
# no code. One in Python is code, and adds commands of its own.
ENTRIES = {
    "train": "experiments.run:main",
    "evaluate": "experiments.evaluate:main",
    "bench": "experiments.bench:main",
    "analysis": "analysis.command:main",
}
Words = dict[str, Any]
Lists = dict[str, list[Any] | None]
# What stands where; a stage's section of a scale has the same keys.
STAGE: dict[str, Any] = {
    "name": str, "command": str, "args": list[str | int | float], "base": Words,
    "cells": list[Words], "axes": Lists, "zip": Lists, "seeds": list[Any], "fits": list[str],
    "scales": Words, "of": str, "where": Words, "refused": str,
}  # fmt: skip
GRID = STAGE | {
    "title": str, "makes": list[str], "note": str, "stages": list[Any], "search": Words
}  # fmt: skip
SEARCH: dict[str, Any] = {"metric": str, "trials": Any, "over": Words}
_SAID = {
    str: "a text",
    list[Any]: "a list",
    list[str]: "a list of texts",
    list[str | int | float]: "a list of words",
    list[Words]: "a list of mappings such as {route: 2-8}",
    Words: "a mapping of a run's keys",
    Lists: "a mapping of keys to lists of values",
}
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Stage:
    """One layer of a grid at one scale, with everything merged."""

    name: str
    entry: str
    args: tuple[str, ...] = ()
    base: Mapping[str, Any] = field(default_factory=dict)
    # Rows of keys that vary together; cells are their product. Those called `seed`, if there are
    # seeds, are first, then `cells`, `zip` and each axis by its key.
    factors: Mapping[str, Rows] = field(default_factory=dict)
    fits: tuple[str, ...] = ()
    of: str | None = None
    where: Mapping[str, Any] = field(default_factory=dict)
    trains: bool = True  # a cell is a run folder's training rather than another command

    def set_keys(self) -> set[str]:
        """Return the keys that the stage sets."""
        return {*self.base, *(key for rows in self.factors.values() for row in rows for key in row)}


@dataclass(frozen=True)
class Grid:
    """A grid as its file says it; `stages(scale)` merges the section of one scale."""

    name: str
    raw: Mapping[str, Any]
    path: Path
    commands: Mapping[str, str] = field(default_factory=dict)  # of a grid in Python

    @property
    def code(self) -> Path | None:
        """The file, if it is code that jobs may need."""
        return self.path if self.path.suffix == ".py" else None

    @property
    def title(self) -> str:
        """The table or figure in words."""
        return str(self.raw.get("title") or self.name)

    @property
    def makes(self) -> list[str]:
        """The tables and figures of `analysis` that read these runs."""
        return list(self.raw.get("makes") or ())

    def stages(self, scale: str) -> list[Stage]:
        """Return the stages at `scale`, first the file's top level; `SweepError` if refused."""
        one_of("scale", scale, SCALES, SweepError)
        if self.raw.get("search"):
            # A search is planned, and its cost estimated, at one corner of its space.
            over = self.raw["search"].get("over") or {}
            try:
                corner = {k: v[0] if isinstance(v, list) else v["low"] for k, v in over.items()}
            except (LookupError, TypeError):
                what = "lists of values or {low: 1, high: 4}, with step: or log: true"
                raise SweepError(f"search over {over}: expected {what}") from None
            return self.at(corner).stages(scale)
        first = {k: v for k, v in self.raw.items() if k in STAGE}
        first = {"name": first.get("command") or "train", **first}
        stages: dict[str, Stage] = {}
        for raw in (first, *(self.raw.get("stages") or ())):
            stage = _stage(raw, scale, ENTRIES | dict(self.commands))
            if stage is None:
                continue
            if stage.name in stages:
                raise SweepError(f"two stages are named {stage.name!r}; rename one")
            if stage.of is not None:
                one_of(f"{stage.name} is of no earlier stage:", stage.of, [*stages], SweepError)
            stages[stage.name] = stage
        return [*stages.values()]

    def at(self, values: Mapping[str, Any]) -> Grid:
        """Return the grid at one point of its search space: values by name."""
        before = self.raw.get("base") or {}
        texts = {name: show(value) for name, value in values.items()}
        base = {key: fill(text, texts) for key, text in before.items()}
        filled = {key: text for key, text in base.items() if text != before[key]}
        rest = {
            name: value
            for name, value in values.items()
            if all(fill(text, {name: ""}) == text for text in before.values())
        }
        kept = {key: value for key, value in self.raw.items() if key != "search"}
        return replace(self, raw={**kept, "base": base, "cells": [rest | filled]})


@dataclass(frozen=True)
class GridCell:
    """One thing to run: a stage's command, its overrides, and what sets it apart."""

    stage: Stage
    overrides: Mapping[str, Any]
    varies: Mapping[str, Any]
    parent: int | None = None  # index of the cell whose run this one starts from

    @property
    def label(self) -> str:
        """What sets the cell apart, as typed on a command line."""
        text = " ".join(f"{k}={show(v)}" for k, v in self.varies.items())
        name = self.stage.name
        return text if name == "train" else f"{name}: {text}".rstrip(": ")


def names() -> list[str]:
    """Return the names of the grids that come with the project."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def is_file_name(name: str) -> bool:
    """Return whether a name is that of a file in a folder: no path and nothing hidden."""
    return bool(name) and Path(name).name == name and not name.startswith(".")


def check_name(name: str) -> str:
    """Return a grid's name, a folder's below `.sweeps` (`..` holds all runs), or `SweepError`."""
    if not re.fullmatch(r"\w[\w.-]{0,99}", name, re.ASCII) or name.lower() in ("code", "lock"):
        raise SweepError(
            f"no grid {name!r}, since a folder gets the name: expected letters, digits, _ - and . "
            "after the first, as in my_grid.yaml, and not code or lock; rename it"
        )
    return name


def load(name: str) -> Grid:
    """Read a grid by name or path (a `.py` file is executed); `SweepError` if it is none."""
    commands: dict[str, str] = {}
    if name.endswith(".py"):
        path = Path(name)
        raw, commands = _python(path)
    else:
        path, raw = named_yaml("grid", name, FOLDER, "base, axes, seeds")
        check_name(path.stem)
    try:
        _check(raw, GRID)
        _check(raw.get("search") or {}, SEARCH)
    except SweepError as error:
        raise SweepError(f"grid {path.stem}: {error}") from None
    return Grid(path.stem, raw, path, commands)


def _python(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Execute a grid in Python; return its values, and its commands as `module:function`."""
    check_name(path.stem)
    if not path.is_file():
        raise SweepError(f"no grid {str(path)!r}: there is no such file")
    known = importlib.util.find_spec(path.stem) if path.stem.isidentifier() else None
    installed = known is not None and "site-packages" in str(known.origin)
    if installed or path.stem in {*sys.stdlib_module_names, *PACKAGES}:
        raise SweepError(f"grid {path}: its jobs could not import {path.stem}, a module; rename it")
    print(f"{path} is code: it is executed, and kept with what it submits", file=sys.stderr)
    # What it names as commands is found beside it, and by a job in the snapshot of the code.
    sys.path.append(str(path.resolve().parent))
    try:
        found = runpy.run_path(str(path), run_name=path.stem)
        raw = {key: found[key] for key in GRID if key in found}
        if callable(raw.get("cells")):
            raw["cells"] = [dict(row) for row in itertools.islice(raw["cells"](), MOST_CELLS + 1)]
        commands = {}
        for name, run in found.get("commands", {}).items():
            commands[str(name)] = f"{path.stem}:{run.__name__}" if callable(run) else str(run)
            if callable(run) and found.get(run.__name__) is not run:
                raise ValueError(f"command {name} needs a function with a name in this file: def")
    except Exception as error:
        raise SweepError(f"grid {path}: {type(error).__name__}: {error}") from error
    return raw, commands


def named_yaml(
    kind: str, name: str, folder: Path, keys: str, numbers_as_text: bool = False
) -> tuple[Path, dict[Any, Any]]:
    """Return the path and the values of a YAML file: by its path, or by its name.

    A name is that of a file in `folder`, which come with the project, or in the current one. `kind`
    (grid, cluster) and some `keys` that its mapping may have are for the messages.

    Raises:
        SweepError: There is no such file, or it holds something else or more than any of ours does.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
    if not path.is_file() and Path(f"{name}.yaml").is_file():
        path = Path(f"{name}.yaml")
    if not path.is_file():
        known = sorted(path.stem for path in folder.glob("*.yaml"))
        what = f"a .yaml file or one of {', '.join(known)}{suggest(name, known)}"
        raise SweepError(f"no {kind} {name!r}; expected {what}")
    try:
        raw = yaml_of(path.read_text(encoding="utf-8"), numbers_as_text=numbers_as_text)
    except ValueError as error:  # not UTF-8, or not YAML
        raise SweepError(f"{kind} {path} is not YAML: {error}") from None
    if not isinstance(raw, dict):
        raise SweepError(f"{kind} {path}: expected a mapping with keys such as {keys}")
    return path, raw


def expand(
    grid: Grid, scale: str = "tiny", user: Mapping[str, Sequence[Any]] | None = None
) -> list[GridCell]:
    """Expand a grid at a scale (tiny, small or paper) to cells, not checked yet.

    A user's values by key replace an axis (or `seed`), pick rows of `cells` and `zip`, become a new
    axis if there are several, and an override of every cell otherwise.

    Raises:
        SweepError: A value picks no row, the grid refuses the scale, or nothing is left.
    """
    cells: list[GridCell] = []
    try:
        stages = grid.stages(scale)
        # What other commands take is not for training: `samples=100`, `w=1.5`.
        theirs = {key for stage in stages if not stage.trains for key in stage.set_keys()}
        theirs -= {"seed", *(key for stage in stages if stage.trains for key in stage.set_keys())}
        for stage in (_applied(stage, user or {}, theirs) for stage in stages):
            _add(cells, stage, scale, parentless=bool(user))
        if not cells:
            raise SweepError(f"no cell is left at scale {scale} with these overrides")
    except SweepError as error:
        raise SweepError(f"grid {grid.name}: {error}") from None
    return cells


def _add(cells: list[GridCell], stage: Stage, scale: str, parentless: bool) -> None:
    """Add a stage's cells, for each of its parents among `cells`; or `SweepError`."""
    parents: list[int | None] = [None]
    if stage.of is not None:
        wanted = {k: v if isinstance(v, list) else [v] for k, v in stage.where.items()}
        parents = [
            index
            for index, cell in enumerate(cells)
            if cell.stage.name == stage.of
            and all(any(same(cell.overrides.get(k), v) for v in vs) for k, vs in wanted.items())
        ]
        if not parents and not parentless:
            raise SweepError(f"stage {stage.name!r} has no parent at scale {scale}")
    if len(cells) + len(parents) * math.prod(map(len, stage.factors.values())) > MOST_CELLS:
        raise SweepError(
            f"stage {stage.name!r} makes more than {MOST_CELLS} cells; launch it in parts, with "
            "fewer values of its axes each"
        )
    for parent in parents:
        base: dict[str, Any] = {"scale": Typed(scale)} if stage.trains else {}
        if parent is not None and stage.trains:
            base |= cells[parent].overrides
        inherited = {} if parent is None else cells[parent].varies
        for rows in itertools.product(*stage.factors.values()):
            varies = {key: value for row in rows for key, value in row.items()}
            # A label ends with the seed.
            varies = dict(sorted(varies.items(), key=lambda item: item[0] == "seed"))
            overrides = {**base, **stage.base, **varies}
            cells.append(GridCell(stage, overrides, {**inherited, **varies}, parent))


def _check(raw: Any, shapes: Mapping[str, Any]) -> None:
    """Raise a `SweepError` if `raw` is no mapping, or has another key or another type of value."""
    if not isinstance(raw, dict):
        raise SweepError(f"expected a mapping with keys {', '.join(sorted(shapes))}, got {raw!r}")
    for key, value in raw.items():
        one_of("unknown key", key, sorted(shapes), SweepError)
        if value is not None and not fits(value, shapes[key]):
            raise SweepError(f"{key} must be {_SAID[shapes[key]]}, got {value!r}")


def _stage(raw: Any, scale: str, known: Mapping[str, str]) -> Stage | None:
    """Merge one stage's section for `scale`; None if a later stage is not part of this scale."""
    _check(raw, STAGE)
    sections = raw.get("scales") or {}
    _check(sections, dict.fromkeys(SCALES, Words))
    section = sections.get(scale) or {}
    _check(section, STAGE)
    merged = {key: value for key, value in {**raw, **section}.items() if value is not None}
    if "refused" in merged:
        if "of" in merged:
            return None
        raise SweepError(f"has no scale {scale}: {merged['refused']}")
    for key in ("base", "axes"):
        both = {**(raw.get(key) or {}), **(section.get(key) or {})}
        merged[key] = {k: v for k, v in both.items() if v is not None}
    base, axes = merged["base"], merged["axes"]
    columns, rows = merged.get("zip", {}), merged.get("cells") or [{}]
    if not all([*axes.values(), *columns.values()]) or len({*map(len, columns.values())}) > 1:
        raise SweepError(f"axes need values, zip columns of one length, got {axes | columns}")
    command = merged.get("command", "train")
    name, trains = merged.get("name", command), command == "train"
    if not is_file_name(name):  # its runs' files get it
        raise SweepError(f"name {name!r}: expected one that a file can have")
    one_of("command", command, list(known), SweepError)
    for kind in merged.get("fits", ()):
        one_of("fits", kind, ("route", "data"), SweepError)
    if "where" in merged and "of" not in merged:
        raise SweepError("where picks runs of an earlier stage; say which with of")
    seeds = merged.get("seeds", [0] if trains and "of" not in merged else None)
    # Both are set for every run, whatever a file says of them; without seeds a later stage's are
    # its parents', or its own.
    ours = {"seed"} if seeds is not None else set()
    ours |= {"paths.runs"} if trains else set()
    if taken := ours & {key for row in (base, axes, columns, *rows) for key in row}:
        raise SweepError(
            f"{' and '.join(taken)} is no key of base, axes, zip or cells; the list seeds has "
            "seeds, and paths.runs=FOLDER is typed with every command"
        )
    factors: dict[str, Rows] = {}
    if seeds is not None:
        factors["seed"] = [{"seed": whole(seed, "seeds: ", SweepError)} for seed in seeds]
    zipped = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    factors |= {"cells": rows, "zip": zipped or [{}]}
    factors |= {key: [{key: value} for value in values] for key, values in axes.items()}
    return Stage(
        name, known[command], tuple(map(str, merged.get("args", ()))), base, factors,
        tuple(merged.get("fits", ())), merged.get("of"), merged.get("where", {}), trains,
    )  # fmt: skip


def _applied(stage: Stage, user: Mapping[str, Sequence[Any]], theirs: set[str]) -> Stage:
    """Return the stage with a user's values; `theirs` are keys of other commands alone."""
    base, factors = dict(stage.base), dict(stage.factors)
    for key, values in user.items():
        rows = [{key: value} for value in values]
        table = next((n for n in ("cells", "zip") if any(key in row for row in factors[n])), None)
        if key == "seed" and key in factors:
            factors[key] = [{key: whole(show(v), "seed=", SweepError)} for v in values]
            continue
        if key in factors:
            factors[key] = rows
            continue
        if table is not None:
            known = [row[key] for row in factors[table] if key in row]
            new = [value for value in values if not any(same(value, one) for one in known)]
            if new and ("." not in key or len(new) < len(values)):
                texts = list(dict.fromkeys(map(show, known)))
                raise SweepError(
                    f"{key}={new[0]} is in none of its cells; expected {', '.join(texts)}"
                    f"{suggest(new[0], texts)}"
                )
            # An option such as sampler.steps=5 is set in every row; backbone=... picks rows.
            factors[table] = [
                {k: v for k, v in row.items() if not (new and k == key)}
                for row in factors[table]
                if new or key not in row or any(same(row[key], value) for value in values)
            ]
            if not new:
                continue
        elif key not in base and (stage.of is not None or key in theirs):
            continue
        elif key == "paths.runs" and not stage.trains:
            continue  # where training puts its run folders is nothing that another command knows
        if len(values) > 1:
            base.pop(key, None)
            factors[key] = rows
        else:
            base[key] = values[0]
    return replace(stage, base=base, factors=factors)
