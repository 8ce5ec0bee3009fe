"""A grid: one YAML file per table or figure, expanded to cells.

    title: Route placement (TREAD, Fig. 8)
    makes: [figure route_placement]
    base: {backbone: dit}                 # overrides of every cell
    cells: [{route: none}, {route: 2-8}]  # rows that vary together (optional)
    axes: {train.lr: [1e-3, 1e-4]}        # product (optional)
    zip: {size: [S, B], train.lr: [1, 2]} # columns of equal length (optional)
    seeds: [0]
    fits: [route]                         # a cell whose route does not fit the depth is left out
    scales:                               # merged over the above for `scale=...`
      paper: {base: {size: B/2}}
      tiny: {refused: "why this grid makes no sense at this scale"}
    stages:                               # later stages start from the runs of an earlier one
      - {name: finetune, of: train, where: {route: auto}, base: {init: "{parent}", route: none}}
      - {name: score, of: train, command: evaluate, args: ["{parent}", --samples, "{n}"], base: {n: 500}}

Cells are `cells x zip x axes`, once per seed; seeds are the outermost loop, so a sweep that is cut short has
whole tables of fewer seeds rather than a part of one table.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from routing.errors import suggest
from sweeps.errors import SweepError
from sweeps.overrides import Typed, same, show

FOLDER = Path(__file__).parent / "grids"
SCALES = ("tiny", "small", "paper")
ENTRIES = {
    "train": "experiments.run:main",
    "evaluate": "experiments.evaluate:main",
    "bench": "experiments.bench:main",
    "analysis": "analysis.cli:main",
}
_STAGE_KEYS = frozenset(
    [
        "name",
        "command",
        "entry",
        "args",
        "base",
        "cells",
        "axes",
        "zip",
        "seeds",
        "fits",
        "scales",
        "of",
        "where",
        "refused",
    ]
)
_GRID_KEYS = _STAGE_KEYS | {"title", "makes", "note", "stages"}


@dataclass(frozen=True)
class Stage:
    """One layer of a grid at one scale, with everything merged."""

    name: str
    entry: str
    args: tuple[str, ...] = ()
    base: Mapping[str, Any] = field(default_factory=dict)
    cells: tuple[Mapping[str, Any], ...] = ({},)
    axes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    zip: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    seeds: tuple[int, ...] | None = None
    fits: tuple[str, ...] = ()
    of: str | None = None
    where: Mapping[str, Any] = field(default_factory=dict)
    trains: bool = True  # a cell is a run folder's training rather than another command

    def keys(self) -> set[str]:
        """Return the keys that the stage sets."""
        return {key for row in (*self.cells, self.base, self.axes, self.zip) for key in row}


@dataclass(frozen=True)
class Grid:
    """A grid as its file says it; `stages(scale)` merges the section of one scale."""

    name: str
    raw: Mapping[str, Any]
    path: Path

    @property
    def title(self) -> str:
        """The table or figure in words."""
        return str(self.raw.get("title", self.name))

    @property
    def makes(self) -> list[str]:
        """The tables and figures of `analysis` that read these runs."""
        return [str(item) for item in self.raw.get("makes", [])]

    def stages(self, scale: str) -> list[Stage]:
        """Return the stages at `scale`, the first one made of the file's top level.

        Raises:
            SweepError: The scale is unknown, or the grid refuses it and says why.
        """
        if scale not in SCALES:
            raise SweepError(f"scale={scale}: expected {', '.join(SCALES)}{suggest(scale, SCALES)}")
        first = {k: v for k, v in self.raw.items() if k in _STAGE_KEYS}
        raws = [{"name": "train", **first}, *self.raw.get("stages", [])]
        stages = [stage for raw in raws if (stage := _stage(self.name, raw, scale)) is not None]
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


@dataclass(frozen=True)
class Cell:
    """One thing to run: an entry point, its overrides, and what sets it apart from its neighbours."""

    stage: str
    entry: str
    args: tuple[str, ...]
    overrides: Mapping[str, Any]
    varies: Mapping[str, Any]
    trains: bool = True
    fits: tuple[str, ...] = ()
    parent: int | None = None  # index of the cell whose run this one starts from

    @property
    def label(self) -> str:
        """What sets the cell apart, as typed on a command line."""
        text = " ".join(f"{k}={show(v)}" for k, v in self.varies.items())
        return text if self.stage == "train" else f"{self.stage}: {text}".rstrip(": ")


def names() -> list[str]:
    """Return the names of the grids that come with the project."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(name: str) -> Grid:
    """Read the grid `name`, or the YAML file at the path `name`.

    Raises:
        SweepError: There is no such grid, or its file is not one.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    if not path.is_file():
        known = names()
        raise SweepError(
            f"no grid {name!r}; expected a .yaml file or one of {', '.join(known)}{suggest(name, known)}"
        )
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SweepError(f"grid {path}: not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(raw, dict):
        raise SweepError(f"grid {path}: expected a mapping with keys such as base, axes, seeds")
    _known(path.stem, raw, _GRID_KEYS)
    return Grid(path.stem, raw, path)


def expand(
    grid: Grid, scale: str = "tiny", user: Mapping[str, Sequence[Any]] | None = None
) -> list[Cell]:
    """Expand a grid at a scale, with a user's overrides, to cells (not yet checked against a config).

    Args:
        grid: From `load`.
        scale: tiny, small or paper.
        user: Values by key: they replace an axis (or `seed`), pick rows of `cells` and `zip`, become a new
            axis if there are several, and an override of every cell otherwise.

    Raises:
        SweepError: A value picks no row, the grid refuses the scale, or nothing is left.
    """
    raw = grid.stages(scale)
    # What other commands take is not for training: `samples=100`, `w=1.5`.
    theirs = {key for stage in raw if not stage.trains for key in stage.keys()} - {"seed"}
    ours = {key for stage in raw if stage.trains for key in stage.keys()}
    stages = [_applied(grid.name, stage, user or {}, theirs - ours) for stage in raw]
    cells: list[Cell] = []
    for stage in stages:
        parents: list[int | None] = [None]
        if stage.of is not None:
            parents = [
                i for i, c in enumerate(cells) if c.stage == stage.of and _matches(c, stage.where)
            ]
            if not parents and not user:
                raise SweepError(
                    f"grid {grid.name}: stage {stage.name!r} has no parent at scale {scale}"
                )
        for parent in parents:
            base = dict(cells[parent].overrides) if parent is not None and stage.trains else {}
            inherited = dict(cells[parent].varies) if parent is not None else {}
            for varies in _rows(stage):
                start = {"scale": Typed(scale)} if stage.trains else {}
                overrides = {**start, **base, **stage.base, **varies}
                cells.append(
                    Cell(stage.name, stage.entry, stage.args, overrides, {**inherited, **varies},
                         stage.trains, stage.fits, parent)
                )  # fmt: skip
    if not cells:
        raise SweepError(f"grid {grid.name}: no cell is left at scale {scale} with these overrides")
    return cells


def _rows(stage: Stage) -> Iterator[dict[str, Any]]:
    """Yield what varies, seeds outermost."""
    columns = list(zip(*stage.zip.values(), strict=True)) or [()]
    for seed in stage.seeds if stage.seeds is not None else (None,):
        for row, column in itertools.product(stage.cells, columns):
            for values in itertools.product(*stage.axes.values()):
                varies = {**row, **dict(zip(stage.zip, column, strict=True))}
                varies |= dict(zip(stage.axes, values, strict=True))
                yield varies if seed is None else {**varies, "seed": seed}


def _matches(cell: Cell, where: Mapping[str, Any]) -> bool:
    for key, want in where.items():
        wanted = want if isinstance(want, list) else [want]
        if not any(same(cell.overrides.get(key), value) for value in wanted):
            return False
    return True


def _applied(grid: str, stage: Stage, user: Mapping[str, Sequence[Any]], theirs: set[str]) -> Stage:
    """Return the stage with a user's values in their places; `theirs` are keys of other commands alone."""
    base, axes, cells, zipped = dict(stage.base), dict(stage.axes), stage.cells, dict(stage.zip)
    seeds = stage.seeds
    for key, values in user.items():
        if key == "seed" and seeds is not None:
            seeds = tuple(int(show(v)) for v in values)
        elif key in axes:
            axes[key] = tuple(values)
        elif key in {k for row in cells for k in row}:
            picked = tuple(r for r in cells if key not in r or any(same(r[key], v) for v in values))
            missing = [v for v in values if not any(same(r.get(key), v) for r in cells)]
            _picked(grid, key, missing, [r[key] for r in cells if key in r])
            cells = picked
        elif key in zipped:
            missing = [v for v in values if not any(same(z, v) for z in zipped[key])]
            _picked(grid, key, missing, list(zipped[key]))
            rows = [i for i, z in enumerate(zipped[key]) if any(same(z, v) for v in values)]
            zipped = {k: tuple(column[i] for i in rows) for k, column in zipped.items()}
        elif key not in base and (not stage.trains or stage.of is not None or key in theirs):
            continue  # it says nothing to this command, or is inherited from the parent
        elif len(values) > 1:
            axes[key] = tuple(values)
            base.pop(key, None)
        else:
            base[key] = values[0]
    return Stage(stage.name, stage.entry, stage.args, base, cells, axes, zipped, seeds, stage.fits,
                 stage.of, stage.where, stage.trains)  # fmt: skip


def _picked(grid: str, key: str, missing: Sequence[Any], known: Sequence[Any]) -> None:
    if missing:
        options = list(dict.fromkeys(show(v) for v in known))
        word = show(missing[0])
        raise SweepError(
            f"grid {grid}: {key}={word} is in none of its cells; expected {', '.join(options)}"
            f"{suggest(word, options)}"
        )


def _stage(grid: str, raw: Any, scale: str) -> Stage | None:
    """Merge one stage's section for `scale`; None if a later stage is not part of this scale."""
    if not isinstance(raw, dict):
        raise SweepError(f"grid {grid}: a stage must be a mapping, got {raw!r}")
    _known(grid, raw, _STAGE_KEYS if raw.get("name") != "train" else _GRID_KEYS)
    sections = raw.get("scales") or {}
    _known(grid, sections, frozenset(SCALES))
    section = sections.get(scale) or {}
    _known(grid, section, _STAGE_KEYS)
    merged = {**raw, **section}
    for key in ("base", "axes"):
        both = {**(raw.get(key) or {}), **(section.get(key) or {})}
        merged[key] = {k: v for k, v in both.items() if v is not None}
    if merged.get("refused"):
        if raw.get("of"):
            return None
        raise SweepError(f"grid {grid} has no scale {scale}: {merged['refused']}")
    axes = {k: _values(grid, k, v) for k, v in merged["axes"].items()}
    zipped = {k: _values(grid, k, v) for k, v in (merged.get("zip") or {}).items()}
    if len({len(v) for v in zipped.values()}) > 1:
        lengths = ", ".join(f"{k} {len(v)}" for k, v in zipped.items())
        raise SweepError(f"grid {grid}: zip needs columns of one length, got {lengths}")
    rows = merged.get("cells") or [{}]
    if not isinstance(rows, list) or not all(isinstance(r, dict) for r in rows):
        raise SweepError(f"grid {grid}: cells must be a list of mappings such as {{route: 2-8}}")
    command = merged.get("command", "train")
    if command not in ENTRIES and not (command == "call" and merged.get("entry")):
        raise SweepError(
            f"grid {grid}: command {command!r}; expected {', '.join(ENTRIES)}, or call with an entry "
            f"module:function{suggest(str(command), ENTRIES)}"
        )
    seeds = merged.get("seeds")
    if seeds is None and raw.get("of") is None and command == "train":
        seeds = [0]
    return Stage(
        name=str(raw.get("name", command)),
        entry=_entry(grid, merged.get("entry") or ENTRIES[command]),
        args=tuple(str(a) for a in merged.get("args") or ()),
        base=merged["base"],
        cells=tuple(rows),
        axes=axes,
        zip=zipped,
        seeds=None if seeds is None else tuple(int(s) for s in seeds),
        fits=tuple(merged.get("fits") or ()),
        of=raw.get("of"),
        where=merged.get("where") or {},
        trains=command == "train",
    )


def _entry(grid: str, text: Any) -> str:
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", str(text)):
        raise SweepError(
            f"grid {grid}: entry {text!r}; expected module:function, such as {ENTRIES['train']}"
        )
    return str(text)


def _values(grid: str, key: str, values: Any) -> tuple[Any, ...]:
    if not isinstance(values, list) or not values:
        raise SweepError(f"grid {grid}: axis {key} must be a list of values, got {values!r}")
    return tuple(values)


def _known(grid: str, raw: Any, keys: frozenset[str]) -> None:
    if not isinstance(raw, dict):
        raise SweepError(
            f"grid {grid}: expected a mapping with keys {', '.join(sorted(keys))}, got {raw!r}"
        )
    for key in raw:
        if key not in keys:
            raise SweepError(
                f"grid {grid}: unknown key {key!r}; expected {', '.join(sorted(keys))}{suggest(key, keys)}"
            )
