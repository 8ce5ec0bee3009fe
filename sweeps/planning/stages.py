"""One layer of a grid at one scale: what its YAML says, and what a user's words make of it."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from routing.errors import one_of, suggest
from routing.parsing import whole
from sweeps import SweepError
from sweeps.planning.overrides import same, show

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


def read(grid: str, raw: Any, scale: str, known: Mapping[str, str] = ENTRIES) -> Stage | None:
    """Merge one stage's section for `scale`; None if a later stage is not part of this scale.

    It may name the commands that are `known`, with their `module:function`.
    """
    if not isinstance(raw, dict):
        raise SweepError(f"grid {grid}: a stage must be a mapping, got {raw!r}")
    refuse_unknown(grid, raw, GRID if raw.get("name") == "train" else STAGE)
    sections = raw.get("scales") or {}
    refuse_unknown(grid, sections, dict.fromkeys(SCALES, dict))
    section = sections.get(scale) or {}
    refuse_unknown(grid, section, STAGE)
    merged = {**raw, **section}
    for key in ("base", "axes"):
        both = {**(raw.get(key) or {}), **(section.get(key) or {})}
        merged[key] = {k: v for k, v in both.items() if v is not None}
    if merged.get("refused"):
        if raw.get("of"):
            return None
        raise SweepError(f"grid {grid} has no scale {scale}: {merged['refused']}")
    axes, columns, rows = merged["axes"], merged.get("zip") or {}, merged.get("cells") or [{}]
    for fault in _faults(merged, axes, columns, rows):
        raise SweepError(f"grid {grid}: {fault}")
    command = merged.get("command") or "train"
    one_of(f"grid {grid}: command", command, list(known), SweepError)
    for kind in merged.get("fits") or ():
        one_of(f"grid {grid}: fits", kind, ("route", "data"), SweepError)
    seeds = merged.get("seeds")
    if seeds is None and raw.get("of") is None and command == "train":
        seeds = [0]
    elif seeds is not None:
        seeds = [whole(seed, f"grid {grid}: seeds: ", SweepError) for seed in seeds]
    zipped = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return Stage(
        name=str(raw.get("name") or command),
        entry=known[command],
        args=tuple(str(a) for a in merged.get("args") or ()),
        base=merged["base"],
        cells=tuple(rows),
        axes={key: tuple(values) for key, values in axes.items()},
        zip=tuple(zipped) or ({},),
        seeds=None if seeds is None else tuple(seeds),
        fits=tuple(merged.get("fits") or ()),
        of=raw.get("of"),
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


def refuse_unknown(grid: str, raw: Any, keys: Mapping[str, type]) -> None:
    """Raise a `SweepError` if `raw` is no mapping, or has another key or another type of value."""
    if not isinstance(raw, dict):
        raise SweepError(
            f"grid {grid}: expected a mapping with keys {', '.join(sorted(keys))}, got {raw!r}"
        )
    for key, value in raw.items():
        one_of(f"grid {grid}: unknown key", key, sorted(keys), SweepError)
        if value is not None and not isinstance(value, keys[key]):
            raise SweepError(f"grid {grid}: {key} must be {_KINDS[keys[key]]}, got {value!r}")


def applied(grid: str, stage: Stage, user: Mapping[str, Sequence[Any]], theirs: set[str]) -> Stage:
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
