"""Which runs may stand in one table: what they share, and what was done to their tokens.

`base` is everything that must be equal before two runs are compared (backbone, size, data,
objective, optimiser, scoring protocol, ...) except the seed, the number of steps and how tokens
were routed. `treatment` is the routing: route, rate, selection, what happens to removed tokens. A
table's cell is the set of seeds of one base and one treatment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import pandas as pd

from analysis.runs.cells import Cell, on_the_way, read_at, scored
from analysis.runs.labels import labelled
from analysis.runs.run_records import AnalysisError
from experiments.config.schema import role
from routing.errors import suggest
from routing.options import RoutingOptions

_HEAD = ("backbone", "size", "data", "objective", "scale")
_IN_HEAD = (
    "config.backbone.name",
    "config.size",
    "config.data.name",
    "config.objective.name",
    "config.scale",
)
_PROTOCOL = ("guidance", "sampler", "reference")
# Routing options that a label names only where they differ from these; the variant's name says what
# is learned, and the last two only how it is computed.
_USUAL = {
    option.name: str(option.default)
    for option in fields(RoutingOptions)
    if option.name not in ("route", "learned", "block", "fp32_after", "checkpoint")
}


@dataclass(frozen=True)
class Base:
    """All treatments of one base, the dense one apart; `recipe` is its key but for the backbone."""

    key: str
    recipe: str
    label: str
    metric: str
    better: str
    dense: Cell | None
    routed: tuple[Cell, ...]

    @property
    def any(self) -> Cell:
        """Some cell, for what all cells share."""
        return self.dense or self.routed[0]

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Dense first, then the treatments."""
        return ((self.dense,) if self.dense else ()) + self.routed

    @property
    def score(self) -> str:
        """Column of the metric."""
        return f"score.{self.metric}"

    def auto(self) -> Cell | None:
        """Return the guideline's cell (2 to depth-4 at 0.5), else the most replicated route."""
        plain = [
            cell for cell in self.routed if cell.first("variant") == "TREAD" and is_usual(cell)
        ]
        span = f"2-{self.any.depth - 4}"
        for cell in plain:
            if cell.first("span") == span and cell.first("rate") == 0.5:
                return cell
        return max(plain, key=lambda cell: len(cell.by_seed(self.score)), default=None)

    def pair(self) -> tuple[Cell | None, Cell | None]:
        """Return the dense cell and the guideline's, after the same steps if both were scored."""
        routed = self.auto()
        return self.dense and (self.dense.at(routed.steps) if routed else self.dense), routed


def same_machine(*cells: Cell) -> bool:
    """Return whether clock times of these cells may be compared: no two devices are named."""
    return len(frozenset().union(*(cell.machines for cell in cells))) < 2


def is_usual(cell: Cell, *except_for: str) -> bool:
    """Return whether a cell's routing options are all the usual ones, apart from those named."""
    return all(
        str(cell.first(f"config.routing.{key}", value)) == value
        for key, value in _USUAL.items()
        if key not in except_for
    )


def named(frame: pd.DataFrame) -> pd.DataFrame:
    """Return runs with the columns base, recipe, setting (the base's label) and treatment.

    Args:
        frame: What `analysis.load` returned.
    """
    if "config.init" in frame:
        # Seeds fine-tune their own parents; what they share is the parents' kind.
        frame = frame.assign(**{"config.init": frame["config.init"].map(parent)})
    frame = _filled(frame, [part for _, part in frame.groupby("backbone")])
    columns = [*_HEAD, *_PROTOCOL, *_columns(frame)]
    shared = [c for c in columns if not c.startswith(("backbone", "config.backbone."))]
    frame = frame.assign(
        base=_keys(frame, columns),
        recipe=_keys(_filled(frame, [frame]), shared),
        treatment=[treatment(row) for row in frame.to_dict("records")],
    )
    apart = [*_PROTOCOL, *(c for c in _columns(frame) if c not in _IN_HEAD)]
    return frame.assign(setting=frame["base"].map(labelled(frame, apart)))


def bases(
    frame: pd.DataFrame, metric: str | None = None, scores: pd.DataFrame | None = None
) -> list[Base]:
    """Sort runs into bases and treatments.

    Args:
        frame: What `analysis.load` returned.
        metric: Full name of the metric that the tables show; None takes each base's own Frechet
            distance.
        scores: What `analysis.scores` returned; None knows of the runs' last scores alone.

    Raises:
        AnalysisError: if no run has that metric.
    """
    known = frame.attrs.get("metrics", {})
    if metric is not None and metric not in known:
        raise AnalysisError(
            f"no run has a score called {metric!r}; there are "
            f"{', '.join(known) or 'none'}{suggest(metric, known)}"
        )
    if frame.empty:
        return []
    frame = named(frame)
    ways = on_the_way(scores)
    found = []
    for key, part in frame.groupby("base", sort=False):
        name = metric or primary(part, known)
        if name is None or f"score.{name}" not in part or part[f"score.{name}"].isna().all():
            continue
        cells = [
            Cell(str(key), str(text), runs, scored(runs, ways), f"score.{name}")
            for text, runs in part.groupby("treatment", sort=False)
        ]
        cells.sort(key=_order)
        dense = next((cell for cell in cells if cell.first("variant") == "dense"), None)
        others = [cell for cell in cells if cell is not dense]
        routed = tuple(read_at(cell, [dense] if dense else [], cell.ends) for cell in others)
        if dense is not None:
            ends = dense.ends.union(*(cell.ends for cell in routed))
            dense = read_at(dense, routed, ends)
        better = known.get(name, {}).get("better") or "lower"
        row = part.iloc[0]
        found.append(Base(str(key), row["recipe"], row["setting"], name, better, dense, routed))
    return sorted(found, key=lambda base: base.label)


def _order(cell: Cell) -> tuple[Any, ...]:
    span = str(cell.first("span"))
    numbers = tuple(int(n) for n in span.replace("+", "-").split("-") if n.isdigit())
    variant = str(cell.first("variant"))
    return (
        variant != "dense",
        variant != "TREAD",
        variant,
        len(numbers),
        numbers,
        cell.first("rate"),
        cell.treatment,
    )


def primary(frame: pd.DataFrame, known: dict[str, dict[str, Any]]) -> str | None:
    """Return the metric most runs have, Frechet distances before others."""
    counts = {
        name: int(frame[f"score.{name}"].notna().sum())
        for name in known
        if f"score.{name}" in frame
    }
    counts = {name: count for name, count in counts.items() if count}
    return max(
        counts, key=lambda name: (known[name].get("key") == "fd", counts[name]), default=None
    )


def treatment(row: Mapping[Any, Any]) -> str:
    """Return how tokens were routed: `dense`, `2-8`, `2-8@0.75, selection=rows`."""
    variant = str(row["variant"])
    if variant.startswith("dense"):
        return variant if parent(row.get("config.init")) is None else "dense fine-tune (F)"
    text = (
        str(row["route"])
        if variant == "TREAD"
        else f"{variant} {row['route']}".replace(" none", "")
    )
    options = []
    for key, usual in _USUAL.items():
        value = row.get(f"config.routing.{key}")
        if value is not None and not pd.isna(value) and str(value) != usual:
            # The variant's name says these already.
            if (key == "remove" and variant != "delayed removal") or (
                key == "reinsert" and value == "none"
            ):
                continue
            options.append(f"{key}={value}")
    return ", ".join([text, *options])


def parent(init: object) -> str | None:
    """Return what a run was started from, `init=RUN@STEP`, without its seed and hash.

    None from scratch.
    """
    if init is None or pd.isna(init):  # type: ignore[call-overload]
        return None
    name = re.split(r"[/\\\\]", str(init).rstrip("/\\"))[-1]
    return re.sub(r"_s\d+-[0-9a-f]{8}(?=@|$)", "", name)


def _columns(frame: pd.DataFrame) -> list[str]:
    """Columns of the keys that decide what is learnt, but for the seed that replicates it."""
    keys = {c: c.removeprefix("config.") for c in frame.columns if c.startswith("config.")}
    return [c for c, key in keys.items() if key != "seed" and role(key) == "learns"]


def _filled(frame: pd.DataFrame, parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Give runs of an older version the value that all newer runs of their part share.

    A key that was added later and never used must not part the runs before it from those after; one
    that newer runs set differently still does.
    """
    known = frame.attrs.get("config_keys", [])
    if len(known) < 2:
        return frame
    sets = [set(keys) for keys in known]
    filled = {}
    for column in _columns(frame):
        has = frame["config_keys"].map(lambda place, c=column: c in sets[int(place)])
        if has.all():
            continue
        values = frame[column].map(str)
        for part in parts:
            present = values[part.index][has[part.index]]
            if present.nunique() == 1:
                values[part.index] = present.iloc[0]
        filled[column] = values
    return frame.assign(**filled)


def _keys(frame: pd.DataFrame, columns: Sequence[str]) -> list[str]:
    present = [column for column in columns if column in frame]
    # Only what varies can tell runs apart; the rest would make keys long for nothing.
    varying = [column for column in present if frame[column].map(str).nunique() > 1]
    rows = frame[varying].map(str).to_numpy().tolist() if varying else [[]] * len(frame)
    return ["; ".join(f"{c}={v}" for c, v in zip(varying, row, strict=True)) for row in rows]


def matching(found: list[Base]) -> Iterator[tuple[Base, Cell, Cell]]:
    """Yield `(base, dense, routed)` for every treatment with a dense run beside it."""
    for base in found:
        if base.dense is not None:
            for cell in base.routed:
                yield base, base.dense, cell
