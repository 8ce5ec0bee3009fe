"""What a score costs: the headline speed-up, and every method at equal steps, FLOPs and time.

Speed-up: per seed, the target is the dense run's best score and its cost the step at which that was
scored; the routed run's cost is the first step at which it scored as well or better (only scored
steps count: no interpolation, so the speed-up is never flattered). The ratio of the two, in steps,
in training multiply-adds and in hours, is averaged over seeds geometrically, with Student's 95 %
interval on the logarithms. Seeds that never get there are counted and shown.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analysis.runs.cells import Base, Cell, Study, same_machine
from analysis.runs.statistics import mean_std, paired, ratio
from analysis.tables import paper
from analysis.tables.score_entries import (
    OTHER_MACHINE,
    PAIRED,
    Memory,
    better_end,
    difference,
    heading,
    metric_decimals,
    paper_notes,
    score,
)
from analysis.tables.table import (
    NOT_RUN,
    Column,
    Entry,
    Table,
    build,
    missing,
    not_run,
    ours,
    published,
    words,
)

COSTS = ("step", "macs", "hours")


@dataclass(frozen=True)
class Reach:
    """One seed's speed-ups (dense cost over routed cost), None where the target is not reached."""

    seed: int
    target: float
    dense: dict[str, float]
    routed: dict[str, float] | None

    def factor(self, cost: str) -> float | None:
        """Return dense over routed cost."""
        if self.routed is None or not self.routed[cost] > 0:
            return None
        return self.dense[cost] / self.routed[cost]


def reach(study: Study, base: Base, dense: Cell, routed: Cell) -> list[Reach]:
    """Return every paired seed's way to the dense run's best score."""
    found = []
    first, second = study.by_seed(base, dense), study.by_seed(base, routed)
    for seed in sorted(set(first) & set(second)):
        one, two = first[seed], second[seed]
        sign = 1.0 if base.better == "lower" else -1.0
        place = int((sign * one["value"]).argmin())
        best = float(one["value"].iloc[place])
        there = np.flatnonzero(sign * two["value"] <= sign * best)
        cost = _cost(two, there[0]) if len(there) else None
        found.append(Reach(seed, best, _cost(one, place), cost))
    return found


def _cost(path: pd.DataFrame, place: int) -> dict[str, float]:
    return {key: float(path[key].iloc[place]) for key in COSTS}


def headline(study: Study) -> Table:
    """Speed-up to the dense run's best score, per backbone and treatment."""
    columns = (
        Column("Routed as", numeric=False),
        Column("Dense best"),
        Column("Seeds that reach it, scored steps", numeric=False),
        *Column.each("Speed-up, steps", "Speed-up, FLOPs", "Speed-up, hours", better="higher"),
        Column("Paper, hours", numeric=False, published=True),
    )
    known = [row for row in paper.rows("speedup") if row["version"] == "v3"]
    text = " and ".join(f"{row['factor']:g}x" for row in known)
    claims = "; ".join(f"{row['factor']:g}x {row['claim']}" for row in known)
    rows: list[tuple[str, list[Entry]]] = []
    for base in study.bases:
        if base.dense is None:
            continue
        head = heading(base)
        claim = words(text) if base.any.first("backbone") == "dit" else published(None)
        for routed in base.routed:
            found = headline_cell(study, base, base.dense, routed)
            entries = [found[key] for key in ("target", "seeds", *COSTS)]
            # The claim is about the guideline's route: beside any other row it would mislead.
            entries.append(claim if routed is base.auto() else words(""))
            rows.append((head, [words(routed.treatment), *entries]))
    rows = rows or [not_run(columns, [words(text)])]
    notes = (
        "Target: each seed's dense run at its best score. A routed run's cost counts to the first "
        "scored step that is as good: a run that was scored once can reach it at its end alone. "
        "Geometric mean over seeds that reach it, Student's 95 % interval on logarithms.",
        f"Paper: {claims}. {paper.citation('speedup')}.",
    )
    return build("speedup", "Speed-up to the dense run's best score", columns, rows, notes)


def headline_cell(study: Study, base: Base, dense: Cell, routed: Cell) -> dict[str, Entry]:
    """Return speed-ups by cost (`step`, `macs`, `hours`), `target` and `seeds` there."""
    reached = reach(study, base, dense, routed)
    there = [item for item in reached if item.routed is not None]
    paths = study.by_seed(base, routed)
    counts = sorted({len(paths[item.seed]) for item in reached})
    scored = f", {'-'.join(map(str, counts))} scored" if counts else ""
    entries = {"seeds": words(f"{len(there)} of {len(reached)}{scored}")}
    digits = metric_decimals(base.metric)
    target = mean_std([item.target for item in reached])
    entries["target"] = ours(target, digits) if reached else score(base, dense)
    entries |= {cost: speedup(reached, cost) for cost in COSTS}
    if there and not same_machine(dense, routed):
        entries["hours"] = OTHER_MACHINE
    return entries


def speedup(reached: Sequence[Reach], cost: str) -> Entry:
    """Return the mean speed-up, by one cost, over the seeds that reach the target."""
    estimate = ratio([factor for item in reached if (factor := item.factor(cost)) is not None])
    if estimate is None:
        known = not reached or any(item.routed is not None for item in reached)
        return missing() if known else words("not reached")
    return dataclasses.replace(ours(estimate, unit="x"), of=len(reached))


_BASELINES = {"dense": "DiT", "TREAD": "TREAD-2", "MaskDiT": "MaskDiT"}
_BUDGETS = {"step": "steps", "macs": "FLOPs", "hours": "time"}


def masking(study: Study) -> Table:
    """Dense, routed, dropping and masking at equal steps, equal FLOPs and equal time."""
    memory, end = Memory.of(study), better_end(study)
    # Whoever went on for longer is not the better one for it; at equal cost there is a best.
    heads = [heading(base) for base in study.bases]
    mixed = any(head.mixed for head in heads)
    columns = [Column("Tokens", numeric=False)]
    for what in _BUDGETS.values():
        columns += [Column(f"Equal {what}", better=end), Column(f"\u0394 {what}")]
    columns += [Column("Own end", better=None if mixed else end), Column("\u0394 own end")]
    columns += [*memory.columns("Memorisation"), Column("Hours")]
    columns += Column.each("Paper (400K)", "Paper hours", published=True)
    known = {row["method"]: row for row in paper.rows("masking") if row["steps_k"] == 400}
    rows = []
    for base, head in zip(study.bases, heads, strict=True):
        if len({str(cell.first("variant")) for cell in base.routed}) < 2:
            continue
        for cell, entries in _masking_rows(study, base, memory):
            theirs = known.get(_BASELINES.get(str(cell.first("variant")), ""), {})
            rows.append((str(head), [*entries, *_published(theirs)]))
    if not rows:
        rows = [not_run(columns, _published(row), name, NOT_RUN) for name, row in known.items()]
    notes = paper_notes(
        "masking",
        "Budgets are the least that every seed of every row spent, so that all rows are read at "
        "the same cost; scores between two scored steps are interpolated linearly. Every "
        "\u0394 is to the dense runs at that cost.",
        PAIRED,
        *memory.notes,
    )
    return build("masking", "Routing against dropping and masking", columns, rows, notes)


def _published(row: Mapping[str, Any]) -> list[Entry]:
    return [published(row.get("fid")), published(row.get("hours"))]


def _masking_rows(study: Study, base: Base, memory: Memory) -> list[tuple[Cell, list[Entry]]]:
    """Return the dense run, the guideline's route and every other method, with their entries."""
    cells = [
        cell
        for cell in base.cells
        if cell is base.dense or cell.first("variant") != "TREAD" or cell is base.auto()
    ]
    paths = {cell.treatment: study.by_seed(base, cell) for cell in cells}
    every = [path for by_seed in paths.values() for path in by_seed.values()]
    # Of runs that logged no time or cost nothing is known there: NaN is left out.
    ends = pd.DataFrame([path.iloc[-1] for path in every], columns=list(_BUDGETS))
    budget = {cost: float(ends[cost].min()) for cost in _BUDGETS}
    digits = metric_decimals(base.metric)
    rows = []
    for cell in cells:
        entries = [words(cell.treatment)]
        for cost in _BUDGETS:
            values = _scores_at(paths[cell.treatment], cost, budget[cost])
            first = paths[base.dense.treatment] if base.dense else {}
            dense = _scores_at(first, cost, budget[cost])
            delta = ours(paired(dense, values), digits, signed=True)
            entries.append(ours(mean_std(list(values.values())), digits))
            entries.append(words("") if cell is base.dense else delta)
        delta = words("") if cell is base.dense else difference(base, cell, base.dense)
        hours = mean_std([v / 3600 for v in cell.by_seed("wall_s").values()])
        entries += [score(base, cell), delta, *memory.entries(base, cell), ours(hours, 3)]
        rows.append((cell, entries))
    return rows


def _scores_at(paths: dict[int, pd.DataFrame], cost: str, budget: float) -> dict[int, float]:
    """Return seed to score at a budget; a seed that was first scored beyond it is left out."""
    found = {}
    for seed, path in paths.items():
        known = path.dropna(subset=[cost])
        if known.empty or not np.isfinite(budget):
            continue
        if float(known[cost].iloc[0]) <= budget * (1 + 1e-9):
            found[seed] = float(np.interp(budget, known[cost], known["value"]))
    return found
