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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.runtime.command import PACKAGES
from routing.errors import one_of, suggest
from routing.parsing import Malformed, whole, yaml_of
from sweeps import SweepError
from sweeps.planning.overrides import Typed, same, show

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
    "analysis": "analysis.analysis_command:main",
}
# What stands where; a stage's section of a scale has the same keys.
STAGE: dict[str, type] = {
    "name": str, "command": str, "args": list, "base": dict, "cells": list, "axes": dict,
    "zip": dict, "seeds": list, "fits": list, "scales": dict, "of": str, "where": dict,
    "refused": str,
}  # fmt: skip
GRID = STAGE | {"title": str, "makes": list, "note": str, "stages": list, "search": dict}
SEARCH: dict[str, type] = {"metric": str, "trials": object, "over": dict}
Rows = tuple[Mapping[str, Any], ...]
_KINDS: dict[type, str] = {str: "a text", list: "a list", dict: "a mapping"}


@dataclass(frozen=True)
class Stage:
    """One layer of a grid at one scale, with everything merged."""

    name: str
    entry: str
    args: tuple[str, ...] = ()
    base: Mapping[str, Any] = field(default_factory=dict)
    cells: Rows = ({},)
    axes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    zip: Rows = ({},)  # its columns, as rows
    seeds: tuple[int, ...] | None = None
    fits: tuple[str, ...] = ()
    of: str | None = None
    where: Mapping[str, Any] = field(default_factory=dict)
    trains: bool = True  # a cell is a run folder's training rather than another command

    @property
    def rows(self) -> int:
        """The number of cells that it makes of each parent."""
        sizes = [len(self.cells), len(self.zip), *map(len, self.axes.values())]
        return math.prod(sizes) * (1 if self.seeds is None else len(self.seeds))

    def combinations(self) -> Iterator[dict[str, Any]]:
        """Yield what varies, by key; seeds are the outermost loop."""
        seeds = [{}] if self.seeds is None else [{"seed": seed} for seed in self.seeds]
        product = itertools.product(*self.axes.values())
        for seed, row, zipped, values in itertools.product(seeds, self.cells, self.zip, product):
            yield {**row, **zipped, **dict(zip(self.axes, values, strict=True)), **seed}

    def set_keys(self) -> set[str]:
        """Return the keys that the stage sets."""
        return {key for row in (*self.cells, *self.zip, self.base, self.axes) for key in row}


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
        return [str(item) for item in self.raw.get("makes") or ()]

    def stages(self, scale: str) -> list[Stage]:
        """Return the stages at `scale`, first the file's top level; `SweepError` if refused."""
        one_of("scale", scale, SCALES, SweepError)
        if self.raw.get("search"):
            # A search is planned, and its cost estimated, at one corner of its space.
            over = self.raw["search"].get("over") or {}
            return self.at({k: _corner(self.name, k, v) for k, v in over.items()}).stages(scale)
        first = {k: v for k, v in self.raw.items() if k in STAGE}
        raws = [{"name": first.get("command") or "train", **first}, *(self.raw.get("stages") or ())]
        known = ENTRIES | dict(self.commands)
        found = (_stage(self.name, raw, scale, known) for raw in raws)
        stages = [stage for stage in found if stage is not None]
        seen: set[str] = set()
        for stage in stages:
            if stage.name in seen:
                raise SweepError(
                    f"grid {self.name}: two stages are named {stage.name!r}; rename one"
                )
            if stage.of is not None and stage.of not in seen:
                raise SweepError(
                    f"grid {self.name}: stage {stage.name!r} is of {stage.of!r}, "
                    f"which is no earlier stage; earlier are {', '.join(sorted(seen)) or 'none'}"
                )
            seen.add(stage.name)
        return stages

    def at(self, values: Mapping[str, Any]) -> Grid:
        """Return the grid at one point of its search space: values by name."""
        rows, base = dict(values), dict(self.raw.get("base") or {})
        for key, text in base.items():
            used = [name for name in values if isinstance(text, str) and f"{{{name}}}" in text]
            for name in used:
                base[key] = base[key].replace(f"{{{name}}}", show(values[name]))
                rows.pop(name, None)
            if used:
                rows[key] = base[key]
        kept = {k: v for k, v in self.raw.items() if k != "search"}
        return replace(self, raw={**kept, "base": base, "cells": [rows]})


def _corner(grid: str, key: Any, space: Any) -> Any:
    if isinstance(space, list) and space:
        return space[0]
    if isinstance(space, Mapping) and {"low", "high"} <= space.keys():
        return space["low"]
    raise SweepError(
        f"grid {grid}: search over {key}: expected a list of values or {{low: 1, high: 4}}, "
        f"with step: or log: true, got {space!r}"
    )


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
    if not re.fullmatch(r"\w[\w.-]{0,99}", name, re.ASCII):
        raise SweepError(
            f"no grid {name!r}: expected letters, digits, _ - and . after the first, as in "
            "my_grid.yaml, since a folder gets the name"
        )
    if name.lower() in ("code", "lock"):
        raise SweepError(f"a grid cannot be named {name}: the folder of sweeps has one; rename it")
    return name


def load(name: str) -> Grid:
    """Read a grid by name or path (a `.py` file is executed); `SweepError` if it is none."""
    if name.endswith(".py"):
        return _python(Path(name))
    path, raw = named_yaml("grid", name, FOLDER, "base, axes, seeds")
    check_name(path.stem)
    _refuse_unknown(path.stem, raw, GRID)
    _refuse_unknown(path.stem, raw.get("search") or {}, SEARCH)
    return Grid(path.stem, raw, path)


def _python(path: Path) -> Grid:
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
    _refuse_unknown(path.stem, raw, GRID)
    _refuse_unknown(path.stem, raw.get("search") or {}, SEARCH)
    return Grid(path.stem, raw, path, commands)


def named_yaml(kind: str, name: str, folder: Path, keys: str) -> tuple[Path, dict[Any, Any]]:
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
        raw = yaml_of(path.read_text(encoding="utf-8"), f"{kind} {path}")
    except UnicodeDecodeError:
        raise SweepError(f"{kind} {path} is not YAML (not UTF-8)") from None
    except Malformed as error:
        raise SweepError(str(error)) from None
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
    raw = grid.stages(scale)
    # What other commands take is not for training: `samples=100`, `w=1.5`.
    theirs = {key for stage in raw if not stage.trains for key in stage.set_keys()} - {"seed"}
    ours = {key for stage in raw if stage.trains for key in stage.set_keys()}
    stages = [_applied(grid.name, stage, user or {}, theirs - ours) for stage in raw]
    cells: list[GridCell] = []
    for stage in stages:
        parents: list[int | None] = [None]
        if stage.of is not None:
            earlier = [i for i, cell in enumerate(cells) if cell.stage.name == stage.of]
            parents = [i for i in earlier if _matches(cells[i], stage.where)]
            if not parents and not user:
                raise SweepError(
                    f"grid {grid.name}: stage {stage.name!r} has no parent at scale {scale}"
                )
        for parent in parents:
            if len(cells) + stage.rows > MOST_CELLS:
                raise SweepError(
                    f"grid {grid.name}: stage {stage.name!r} makes more than {MOST_CELLS} cells; "
                    "launch it in parts, with fewer values of its axes each"
                )
            base = dict(cells[parent].overrides) if parent is not None and stage.trains else {}
            inherited = dict(cells[parent].varies) if parent is not None else {}
            for varies in stage.combinations():
                start = {"scale": Typed(scale)} if stage.trains else {}
                overrides = {**start, **base, **stage.base, **varies}
                cells.append(GridCell(stage, overrides, {**inherited, **varies}, parent))
    if not cells:
        raise SweepError(f"grid {grid.name}: no cell is left at scale {scale} with these overrides")
    return cells


def _matches(cell: GridCell, where: Mapping[str, Any]) -> bool:
    return all(
        any(same(cell.overrides.get(key), v) for v in (want if isinstance(want, list) else [want]))
        for key, want in where.items()
    )


def _stage(grid: str, raw: Any, scale: str, known: Mapping[str, str]) -> Stage | None:
    """Merge one stage's section for `scale`; None if a later stage is not part of this scale."""
    if not isinstance(raw, dict):
        raise SweepError(f"grid {grid}: a stage must be a mapping, got {raw!r}")
    _refuse_unknown(grid, raw, GRID if raw.get("name") == "train" else STAGE)
    sections = raw.get("scales") or {}
    _refuse_unknown(grid, sections, dict.fromkeys(SCALES, dict))
    section = sections.get(scale) or {}
    _refuse_unknown(grid, section, STAGE)
    merged = {**raw, **section}
    for key in ("base", "axes"):
        both = {**(raw.get(key) or {}), **(section.get(key) or {})}
        merged[key] = {k: v for k, v in both.items() if v is not None}
    if merged.get("refused"):
        if merged.get("of"):
            return None
        raise SweepError(f"grid {grid} has no scale {scale}: {merged['refused']}")
    axes, columns, rows = merged["axes"], merged.get("zip") or {}, merged.get("cells") or [{}]
    for fault in _faults(merged, axes, columns, rows):
        raise SweepError(f"grid {grid}: {fault}")
    command = merged.get("command") or "train"
    name = str(merged.get("name") or command)
    if not is_file_name(name):  # its runs' files get it
        raise SweepError(f"grid {grid}: name {name!r}: expected one that a file can have")
    one_of(f"grid {grid}: command", command, list(known), SweepError)
    for kind in merged.get("fits") or ():
        one_of(f"grid {grid}: fits", kind, ("route", "data"), SweepError)
    seeds = merged.get("seeds")
    if seeds is None and merged.get("of") is None and command == "train":
        seeds = [0]
    elif seeds is not None:
        seeds = [whole(seed, f"grid {grid}: seeds: ", SweepError) for seed in seeds]
    # Both are set for every run, whatever a file says of them.
    elsewhere = {"seed": "the list seeds has them"} if seeds is not None else {}
    if command == "train":
        elsewhere["paths.runs"] = "type paths.runs=FOLDER with every command"
    for key, where in elsewhere.items():
        if any(key in words for words in (merged["base"], axes, columns, *rows)):
            raise SweepError(f"grid {grid}: {key} is no key of base, axes, zip or cells; {where}")
    zipped = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return Stage(
        name=name,
        entry=known[command],
        args=tuple(str(a) for a in merged.get("args") or ()),
        base=merged["base"],
        cells=tuple(rows),
        axes={key: tuple(values) for key, values in axes.items()},
        zip=tuple(zipped) or ({},),
        seeds=None if seeds is None else tuple(seeds),
        fits=tuple(merged.get("fits") or ()),
        of=merged.get("of"),
        where=merged.get("where") or {},
        trains=command == "train",
    )


def _faults(
    merged: Mapping[str, Any], axes: Mapping[Any, Any], columns: Mapping[Any, Any], rows: list[Any]
) -> Iterator[str]:
    """Yield what is wrong with a stage's values; later checks rely on earlier ones."""
    for key, values in (*axes.items(), *columns.items()):
        if not isinstance(values, list) or not values:
            yield f"axis {key} must be a list of values, got {values!r}"
    if len({len(values) for values in columns.values()}) > 1:
        lengths = ", ".join(f"{key} {len(values)}" for key, values in columns.items())
        yield f"zip needs columns of one length, got {lengths}"
    if not all(isinstance(row, dict) for row in rows):
        yield "cells must be a list of mappings such as {route: 2-8}"
    parts = [(key, merged.get(key) or {}) for key in ("base", "axes", "zip", "where")]
    for part, words in (*parts, *(("cells", row) for row in rows)):
        for word in words:
            if not isinstance(word, str) or not word:
                yield f"{part} has the key {word!r}; expected a run's key"
    if merged.get("where") and not merged.get("of"):
        yield "where picks runs of an earlier stage; say which with of"
    for word in merged.get("args") or ():
        if not isinstance(word, str | int | float):
            yield f"args has {word!r}; expected words"


def _refuse_unknown(grid: str, raw: Any, keys: Mapping[str, type]) -> None:
    """Raise a `SweepError` if `raw` is no mapping, or has another key or another type of value."""
    if not isinstance(raw, dict):
        raise SweepError(
            f"grid {grid}: expected a mapping with keys {', '.join(sorted(keys))}, got {raw!r}"
        )
    for key, value in raw.items():
        one_of(f"grid {grid}: unknown key", key, sorted(keys), SweepError)
        if value is not None and not isinstance(value, keys[key]):
            raise SweepError(f"grid {grid}: {key} must be {_KINDS[keys[key]]}, got {value!r}")


def _applied(grid: str, stage: Stage, user: Mapping[str, Sequence[Any]], theirs: set[str]) -> Stage:
    """Return the stage with a user's values; `theirs` are keys of other commands alone."""
    base, axes, cells, zipped = dict(stage.base), dict(stage.axes), stage.cells, stage.zip
    seeds = stage.seeds
    for key, values in user.items():
        inherited = stage.of is not None or key in theirs
        # Where training puts its run folders is nothing that another command knows.
        foreign = key == "paths.runs" and not stage.trains
        if key == "seed" and seeds is not None:
            seeds = tuple(whole(show(v), "seed=", SweepError) for v in values)
        elif key in axes:
            axes[key] = tuple(values)
        elif "." in key and any(key in row for row in cells) and not _picks(cells, key, values):
            # An option such as sampler.steps=5 is set in every row; backbone=... picks rows.
            cells = tuple({k: v for k, v in row.items() if k != key} for row in cells)
            base, axes = _set(base, axes, key, values)
        elif any(key in row for row in cells):
            cells = _picked(grid, cells, key, values)
        elif any(key in row for row in zipped):
            zipped = _picked(grid, zipped, key, values)
        elif key in base or not (inherited or foreign):
            base, axes = _set(base, axes, key, values)
    return replace(stage, base=base, axes=axes, cells=cells, zip=zipped, seeds=seeds)


def _picks(rows: Rows, key: str, values: Sequence[Any]) -> bool:
    return any(same(row[key], value) for row in rows if key in row for value in values)


def _picked(grid: str, rows: Rows, key: str, values: Sequence[Any]) -> Rows:
    for value in values:
        if not any(same(row.get(key), value) for row in rows):
            known = list(dict.fromkeys(show(row[key]) for row in rows if key in row))
            raise SweepError(
                f"grid {grid}: {key}={show(value)} is in none of its cells; expected "
                f"{', '.join(known)}{suggest(show(value), known)}"
            )
    return tuple(r for r in rows if key not in r or any(same(r[key], v) for v in values))


def _set(
    base: dict[str, Any], axes: dict[str, tuple[Any, ...]], key: str, values: Sequence[Any]
) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    if len(values) > 1:
        return {k: v for k, v in base.items() if k != key}, {**axes, key: tuple(values)}
    return {**base, key: values[0]}, axes
