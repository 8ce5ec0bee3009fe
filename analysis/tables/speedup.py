"""The headline: how much sooner a routed run reaches the dense run's best score.

Per seed, the target is the dense run's best score and its cost the step at which that was scored;
the routed run's cost is the first step at which it scored as well or better (only scored steps
count: no interpolation, so the speed-up is never flattered). The ratio of the two, in steps, in
training multiply-adds and in hours, is averaged over seeds geometrically, with Student's 95 %
interval on the logarithms. Seeds that never get there are counted and shown.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pandas as pd

from analysis.runs.cells import Base, Cell, Study, matching, same_machine
from analysis.runs.statistics import Estimate, mean_std, ratio
from analysis.tables import paper
from analysis.tables.headings import OTHER_MACHINE, decimals, heading, score
from analysis.tables.table import Column, Entry, Table, build, missing, ours, published, words

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
        best = one.iloc[int((sign * one["value"]).argmin())]
        there = two[sign * two["value"] <= sign * best["value"]]
        cost = None if there.empty else _cost(there.iloc[0])
        found.append(Reach(seed, float(best["value"]), _cost(best), cost))
    return found


def _cost(row: pd.Series) -> dict[str, float]:
    return {key: float(row[key]) for key in COSTS}


def headline(study: Study) -> Table:
    """Speed-up to the dense run's best score, per backbone and treatment."""
    columns = (
        Column("Routed as", numeric=False),
        Column("Dense best"),
        Column("Seeds that reach it, scored steps", numeric=False),
        Column("Speed-up, steps", better="higher"),
        Column("Speed-up, FLOPs", better="higher"),
        Column("Speed-up, hours", better="higher"),
        Column("Paper, hours", numeric=False, published=True),
    )
    known = [row for row in paper.rows("speedup") if row["version"] == "v3"]
    text = " and ".join(f"{row['factor']:g}x" for row in known)
    claims = "; ".join(f"{row['factor']:g}x {row['claim']}" for row in known)
    heads = {base.key: heading(base) for base in study.bases}
    rows: list[tuple[str, list[Entry]]] = [
        (heads[base.key], _headline_row(study, base, dense, routed, text))
        for base, dense, routed in matching(study.bases)
    ]
    if not rows:
        costs = [missing()] * len(COSTS)
        rows = [("", [words("none run"), missing(), words(""), *costs, words(text)])]
    notes = (
        "Target: each seed's dense run at its best score. A routed run's cost counts to the first "
        "scored step that is "
        "as good: a run that was scored once can reach it at its end alone. Geometric mean over "
        "seeds that reach it, Student's 95 % interval on logarithms.",
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
    digits = decimals(base)
    target = mean_std([item.target for item in reached])
    entries["target"] = ours(target, digits) if reached else score(base, dense)
    for cost in COSTS:
        if cost == "hours" and there and not same_machine(dense, routed):
            entries[cost] = OTHER_MACHINE
            continue
        factors = [factor for item in there if (factor := item.factor(cost)) is not None]
        entries[cost] = _factor(ratio(factors), len(reached))
    return entries


def _headline_row(study: Study, base: Base, dense: Cell, routed: Cell, text: str) -> list[Entry]:
    found = headline_cell(study, base, dense, routed)
    # The claim is about the guideline's route: beside any other row it would mislead.
    claim = words("")
    if routed is base.auto():
        claim = words(text) if base.any.first("backbone") == "dit" else published(None)
    costs = [found[cost] for cost in COSTS]
    return [words(routed.treatment), found["target"], found["seeds"], *costs, claim]


def _factor(estimate: Estimate | None, tried: int) -> Entry:
    if not tried:
        return missing()
    if estimate is None:
        return words("not reached")
    return dataclasses.replace(ours(estimate, 2, unit="x"), of=tried)
