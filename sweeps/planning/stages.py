"""One layer of a grid at one scale: what its YAML says, and what a user's words make of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

    Args:
        grid: Its name.
        raw: The section, as the grid has it.
        scale: tiny, small or paper.
        known: Commands that it may name, with their `module:function`.
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
    axes = {k: _values(grid, k, v) for k, v in merged["axes"].items()}
    zipped = {k: _values(grid, k, v) for k, v in (merged.get("zip") or {}).items()}
    if len({len(v) for v in zipped.values()}) > 1:
        lengths = ", ".join(f"{k} {len(v)}" for k, v in zipped.items())
        raise SweepError(f"grid {grid}: zip needs columns of one length, got {lengths}")
    rows = merged.get("cells") or [{}]
    if not all(isinstance(r, dict) for r in rows):
        raise SweepError(f"grid {grid}: cells must be a list of mappings such as {{route: 2-8}}")
    command = merged.get("command", "train")
    one_of(f"grid {grid}: command", command, list(known), SweepError)
    for key in ("base", "axes", "zip", "where"):
        _texts(grid, key, merged.get(key) or {})
    for kind in merged.get("fits") or ():
        one_of(f"grid {grid}: fits", kind, ("route", "data"), SweepError)
    if merged.get("where") and not merged.get("of"):
        raise SweepError(f"grid {grid}: where picks runs of an earlier stage; say which with of")
    for row in rows:
        _texts(grid, "cells", row)
    for word in merged.get("args") or ():
        if not isinstance(word, str | int | float):
            raise SweepError(f"grid {grid}: args has {word!r}; expected words")
    seeds = merged.get("seeds")
    if seeds is None and raw.get("of") is None and command == "train":
        seeds = [0]
    elif seeds is not None:
        seeds = [whole(seed, f"grid {grid}: seeds: ", SweepError) for seed in seeds]
    return Stage(
        name=str(raw.get("name") or command),
        entry=known[command],
        args=tuple(str(a) for a in merged.get("args") or ()),
        base=merged["base"],
        cells=tuple(rows),
        axes=axes,
        zip=tuple(
            dict(zip(zipped, values, strict=True)) for values in zip(*zipped.values(), strict=True)
        )
        or ({},),
        seeds=None if seeds is None else tuple(seeds),
        fits=tuple(merged.get("fits") or ()),
        of=raw.get("of"),
        where=merged.get("where") or {},
        trains=command == "train",
    )


def _texts(grid: str, key: str, words: Iterable[Any]) -> None:
    for word in words:
        if not isinstance(word, str) or not word:
            raise SweepError(f"grid {grid}: {key} has the key {word!r}; expected a run's key")


def _values(grid: str, key: str, values: Any) -> tuple[Any, ...]:
    if not isinstance(values, list) or not values:
        raise SweepError(f"grid {grid}: axis {key} must be a list of values, got {values!r}")
    return tuple(values)


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
        elif "." in key and _picks_nothing(cells, key, values):
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


def _picks_nothing(rows: Rows, key: str, values: Sequence[Any]) -> bool:
    have = [row[key] for row in rows if key in row]
    return bool(have) and not any(same(value, v) for value in have for v in values)


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
