"""A grid: one YAML file per table or figure of the paper, and its stages at one scale.

docs/grids.md explains every key with examples. `sweeps.plan.cells` expands a grid to cells.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from backbones.parsing import whole
from backbones.validation import validate
from routing.errors import UserError, one_of, require
from sweeps import SweepError
from sweeps.plan.config_files import read_yaml
from sweeps.plan.resources import check_cluster
from sweeps.store.folder import is_file_name
from sweeps.store.overrides import fill, format_value

FOLDER = Path(__file__).parents[1] / "grids"
# Each is composed and checked before the first is submitted, more than fifty a second.
MAX_CELLS = 10_000
SCALES = ("tiny", "small", "paper")
# Entry points by command. A YAML grid may come from anywhere, so it cannot name code of its own.
ENTRIES = {
    "train": "experiments.run:main",
    "evaluate": "experiments.evaluate:main",
    "bench": "experiments.bench:main",
    "analysis": "analysis.command:main",
}
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class StageOptions:
    """Keys of a stage: at the top level of a grid file, in `stages`, and in sections of `scales`.

    A key that is null counts as absent; in a section of `scales` it removes the stage's own.
    """

    name: Annotated[str | None, "name of the stage; the command's by default"] = None
    command: Annotated[str | None, "what a cell runs; train by default"] = None
    args: Annotated[list[str | int | float] | None, "arguments of another command"] = None
    base: Annotated[dict[str, Any] | None, "overrides of every run"] = None
    cells: Annotated[list[dict[str, Any]] | None, "rows of keys that vary together"] = None
    axes: Annotated[dict[str, Any] | None, "lists of values by key: their product"] = None
    zip: Annotated[dict[str, Any] | None, "lists of one length by key, read as columns"] = None
    seeds: Annotated[list[Any] | None, "seeds; [0] by default"] = None
    fits: Annotated[list[Literal["route", "data"]] | None, "misfits that are left out"] = None
    scales: ScaleSections | None = None
    of: Annotated[str | None, "earlier stage whose runs this one starts from"] = None
    where: Annotated[dict[str, Any] | None, "which runs of that stage"] = None
    after: Annotated[str | None, "earlier stage whose runs have to end, however they end"] = None
    cluster: Annotated[dict[str, Any] | None, "resources of its runs, as in a cluster file"] = None
    refused: Annotated[str | None, "why a scale is refused"] = None

    def check_consistency(self) -> None:
        """Refuse axes and columns that are not lists of values, and `where` without `of`."""
        for key, columns in (("axes", self.axes), ("zip", self.zip)):
            for name, values in (columns or {}).items():
                # A section of `scales` may remove an axis.
                if not isinstance(values, list) and not (key == "axes" and values is None):
                    raise SweepError(f"{key}.{name}={values}: expected a list of values")
        require(
            self.after is None or (self.of is None and self.command not in (None, "train")),
            f"after={self.after}: expected with a command such as analysis, and without of",
            SweepError,
        )
        for section in (self.cluster, *(row.get("cluster") for row in self.cells or ())):
            check_cluster(section)
        if self.where is not None and self.of is None:
            raise SweepError("where selects runs of an earlier stage: expected its name in of")


@dataclass(frozen=True)
class ScaleSections:
    """What a stage changes at each scale."""

    tiny: StageOptions | None = None
    small: StageOptions | None = None
    paper: StageOptions | None = None


@dataclass(frozen=True)
class SearchOptions:
    """The `search` section of a grid."""

    over: Annotated[dict[str, Any], "lists of values, or ranges {low, high, step, log}, by name"]
    metric: Annotated[str, "metric of eval.metrics to optimise"] = "fd"
    trials: Annotated[int, Ge(1), Le(MAX_CELLS), "number of trials in all"] = 20

    def check_consistency(self) -> None:
        """Refuse an empty space and ranges without bounds."""
        for name, space in self.over.items():
            bounds = isinstance(space, dict) and {"low", "high"} <= space.keys()
            require(
                bounds or (isinstance(space, list) and space),
                f"search.over.{name}={space}: expected a list of values or {{low: 1, high: 4}} "
                "with step: or log: true",
                SweepError,
            )
        require(
            self.over, "search.over={}: expected names with lists of values or ranges", SweepError
        )

    def corner(self) -> dict[str, Any]:
        """Return the first value or the lower bound of every name."""
        values = {}
        for name, space in self.over.items():
            values[name] = space[0] if isinstance(space, list) else space["low"]
        return values


@dataclass(frozen=True)
class GridOptions(StageOptions):
    """Keys of a grid file: those of its first stage and these."""

    title: Annotated[str | None, "the table or figure in words"] = None
    makes: Annotated[list[str] | None, "tables and figures of the analysis that read it"] = None
    note: Annotated[str | None, "remarks"] = None
    stages: Annotated[list[dict[str, Any]] | None, "later stages"] = None
    search: SearchOptions | None = None


STAGE_KEYS = tuple(field.name for field in fields(StageOptions))


@dataclass(frozen=True)
class Stage:
    """One stage of a grid at one scale, with its section for that scale merged in.

    Attributes:
        entry: What its cells run, `module:function`.
        factors: Rows of keys that vary together, by name of the factor; cells are their product.
            The first is `seed` if there are seeds, then `cells`, `zip` and each axis by its key.
        fits: What leaves out a cell that does not fit, instead of refusing the grid.
        of: Earlier stage whose runs this one starts from; `where` selects among them by override.
        after: Earlier stage whose runs have to end first, however they end.
        cluster: Keys of the cluster file that its runs change; a row of `cells` may have its own.
        trains: Whether a cell trains a run rather than running another command.
    """

    name: str
    entry: str
    args: tuple[str, ...] = ()
    base: Mapping[str, Any] = field(default_factory=dict)
    factors: Mapping[str, Rows] = field(default_factory=dict)
    fits: tuple[str, ...] = ()
    of: str | None = None
    where: Mapping[str, Any] = field(default_factory=dict)
    after: str | None = None
    cluster: Mapping[str, Any] = field(default_factory=dict)
    trains: bool = True

    def set_keys(self) -> set[str]:
        """Return the keys that the stage sets."""
        keys = set(self.base)
        for rows in self.factors.values():
            for row in rows:
                keys.update(row)
        return keys - {"cluster"}


@dataclass(frozen=True)
class Grid:
    """A grid as its file has it; `stages(scale)` merges the sections of one scale."""

    name: str
    raw: Mapping[str, Any]
    path: Path

    @property
    def title(self) -> str:
        """The table or figure in words."""
        return str(self.raw.get("title") or self.name)

    @property
    def makes(self) -> list[str]:
        """Tables and figures of the analysis that read these runs."""
        return list(self.raw.get("makes") or ())

    @property
    def search(self) -> SearchOptions | None:
        """The `search` section, None for a grid of cells."""
        section = self.raw.get("search")
        return validate(SearchOptions, section, "search.") if section else None

    def stages(self, scale: str) -> list[Stage]:
        """Return the stages at a scale, the top level of the file first.

        Raises:
            UserError: The grid refuses the scale, or a stage is invalid.
        """
        one_of("scale", scale, SCALES, SweepError)
        if self.search is not None:
            # A search is planned, and its cost estimated, at one corner of its space.
            return self.at(self.search.corner()).stages(scale)
        first = {key: value for key, value in self.raw.items() if key in STAGE_KEYS}
        stages: dict[str, Stage] = {}
        for raw in (first, *(self.raw.get("stages") or ())):
            stage = _resolve_stage(raw, scale)
            if stage is None:
                continue
            require(
                stage.name not in stages,
                f"two stages are named {stage.name!r}: expected different names",
                SweepError,
            )
            for key, earlier in (("of", stage.of), ("after", stage.after)):
                if earlier is not None:
                    one_of(f"stage {stage.name}: {key}", earlier, list(stages), SweepError)
            stages[stage.name] = stage
        return list(stages.values())

    def at(self, values: Mapping[str, Any]) -> Grid:
        """Return the grid at one point of its search space.

        A name that `base` has in braces is filled in there; any other name is itself a key.
        """
        texts = {name: format_value(value) for name, value in values.items()}
        base, cell = dict(self.raw.get("base") or {}), {}
        for name, value in values.items():
            if not any(f"{{{name}}}" in text for text in base.values() if isinstance(text, str)):
                cell[name] = value
        for key, text in base.items():
            base[key] = fill(text, texts)
            if base[key] != text:
                cell[key] = base[key]
        raw = {key: value for key, value in self.raw.items() if key != "search"}
        return replace(self, raw={**raw, "base": base, "cells": [cell]})


def names() -> list[str]:
    """Return the names of the grids in the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def check_name(name: str) -> str:
    """Return a grid's name if it can name a folder in `.sweeps`; `..` would be all runs."""
    require(
        re.fullmatch("\\w[\\w.-]{0,99}", name, re.ASCII) and name.lower() not in ("code", "lock"),
        f"grid {name!r}: a folder gets the name, so expected letters, digits, _, - and . after "
        "the first, and not code or lock; rename it",
        SweepError,
    )
    return name


def load(name: str) -> Grid:
    """Read a grid by name or path.

    Raises:
        UserError: There is no such file, or it is not a valid grid.
    """
    path, raw = read_yaml("grid", name, FOLDER)
    check_name(path.stem)
    try:
        validate(GridOptions, raw)
        for index, stage in enumerate(raw.get("stages") or ()):
            validate(StageOptions, stage, f"stages.{index}.")
    except UserError as error:
        raise SweepError(f"grid {path.stem}: {error}") from None
    return Grid(path.stem, raw, path)


def _resolve_stage(raw: Mapping[str, Any], scale: str) -> Stage | None:
    """Merge a stage's section for a scale; None for a later stage that is not part of the scale."""
    options = _merge_scale(raw, scale)
    if options.refused is not None:
        if options.of is not None:
            return None
        raise SweepError(f"has no scale {scale}: {options.refused}")
    command = options.command or "train"
    one_of("command", command, list(ENTRIES), SweepError)
    name = options.name or command
    require(
        is_file_name(name),
        f"name={name}: expected a file name, since its runs' files have it",
        SweepError,
    )
    seeds = options.seeds
    if seeds is None and command == "train" and options.of is None:
        seeds = [0]
    _check_reserved(options, has_seeds=seeds is not None)
    return Stage(
        name=name,
        entry=ENTRIES[command],
        args=tuple(map(str, options.args or ())),
        base=options.base or {},
        factors=_factors(options, seeds),
        fits=tuple(options.fits or ()),
        of=options.of,
        where=options.where or {},
        after=options.after,
        cluster=options.cluster or {},
        trains=command == "train",
    )


def _merge_scale(raw: Mapping[str, Any], scale: str) -> StageOptions:
    """Return a stage with its section for a scale: `base` and `axes` merged, the rest replaced."""
    section = (raw.get("scales") or {}).get(scale) or {}
    merged = {**raw, **section}
    for key in ("base", "axes", "cluster"):
        values = {**(raw.get(key) or {}), **(section.get(key) or {})}
        merged[key] = {name: value for name, value in values.items() if value is not None}
    options: StageOptions = validate(StageOptions, merged)
    columns = options.zip or {}
    lengths = {len(values) for values in columns.values()}
    require(
        all([*merged["axes"].values(), *columns.values()]) and len(lengths) <= 1,
        f"axes={merged['axes']}, zip={columns}: expected values, and zip columns of one length",
        SweepError,
    )
    return options


def _factors(options: StageOptions, seeds: Sequence[Any] | None) -> dict[str, Rows]:
    factors: dict[str, Rows] = {}
    if seeds is not None:
        factors["seed"] = [{"seed": whole(seed, "seeds: ", SweepError)} for seed in seeds]
    columns = options.zip or {}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    factors["cells"] = options.cells or [{}]
    factors["zip"] = rows or [{}]
    for key, values in (options.axes or {}).items():
        factors[key] = [{key: value} for value in values]
    return factors


def _check_reserved(options: StageOptions, has_seeds: bool) -> None:
    """Refuse keys that are set for every run: `seed` if the stage has seeds, and folders."""
    keys = {*(options.base or {}), *(options.axes or {}), *(options.zip or {})}
    require(
        "cluster" not in keys,
        "cluster: expected in a stage or in an entry of cells, not in base, axes or zip",
        SweepError,
    )
    for row in options.cells or ():
        keys.update(row)
    reserved = {"seed"} if has_seeds else set()
    if options.command in (None, "train"):
        reserved.update(("paths.runs", "paths.cache"))
    require(
        not reserved & keys,
        f"{' and '.join(sorted(reserved & keys))}: expected in none of base, axes, zip and "
        "cells; the list seeds has seeds, and folders are typed with every command",
        SweepError,
    )
