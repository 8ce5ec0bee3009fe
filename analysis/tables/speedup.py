"""What a score costs: the headline saving, and methods at equal cost.

Speed-up: per seed, the target is the dense run's best score and its cost the step at which that was
scored; the routed run's cost is the first step at which it scored as well or better (only scored
steps count: no interpolation, so the speed-up is never flattered). The ratio of the two, in steps
and in training multiply-adds, is averaged over seeds geometrically, with Student's 95 % interval on
the logarithms. Seeds that never get there are counted and shown.

The wall-clock time of training runs is in no table: it reflects what else ran on the machine.
`experiments/bench.py` times dense and routed steps in turn.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from analysis.comparison.aggregation import mean_std, paired, ratio
from analysis.comparison.groups import Group, Variant
from analysis.comparison.results import Results
from analysis.tables import entries, paper
from analysis.tables.table import PAIRED, Column, Entry, RowValues, Table, Value, build, measured

COSTS = ("step", "macs")
_BUDGETS = {"step": "steps", "macs": "FLOPs"}
# The paper's rows of the masking table, by our method.
_PAPER_METHODS = {"dense": "DiT", "TREAD": "TREAD-2", "MaskDiT": "MaskDiT"}


def reach(group: Group, dense: Variant, routed: Variant) -> pd.DataFrame:
    """Return what each paired seed spent to the dense run's best score, its `target`.

    A row per seed: whether it was `reached`, `dense_COST` and `routed_COST` (NaN where the routed
    run never reaches it), and their ratio `COST`.
    """
    sign = 1.0 if group.better == "lower" else -1.0
    rows = {}
    for seed in sorted(dense.curves.keys() & routed.curves):
        dense_curve, routed_curve = dense.curves[seed], routed.curves[seed]
        best = int((sign * dense_curve["value"].to_numpy()).argmin())
        target = dense_curve["value"].to_numpy()[best]
        (as_good,) = np.nonzero(sign * routed_curve["value"].to_numpy() <= sign * target)
        row = {"target": target, "reached": len(as_good) > 0}
        for cost in COSTS:
            spent = routed_curve[cost].to_numpy()[as_good[0]] if len(as_good) else float("nan")
            row[f"dense_{cost}"] = dense_curve[cost].to_numpy()[best]
            row[f"routed_{cost}"] = spent
            row[cost] = row[f"dense_{cost}"] / spent if spent > 0 else float("nan")
        rows[seed] = row
    columns = ["target", "reached"]
    for cost in COSTS:
        columns += [f"dense_{cost}", f"routed_{cost}", cost]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns)


def headline(results: Results) -> Table:
    """Speed-up to the dense run's best score, per backbone and variant."""
    columns = (
        Column("Routed as", numeric=False),
        Column("Dense best"),
        Column("Seeds that reach it, scored steps", numeric=False),
        *Column.each("Speed-up, steps", "Speed-up, FLOPs", better="higher"),
    )
    rows: list[RowValues] = []
    for group in results.groups:
        if group.baseline is None:
            continue
        for routed in group.routed:
            if _says_nothing(reach(group, group.baseline, routed), routed):
                continue
            speedups = headline_entries(group, group.baseline, routed)
            values = [speedups[key] for key in ("target", "seeds", *COSTS)]
            rows.append((entries.heading(group), [routed.name, *values]))
    claims = []
    for row in paper.rows("speedup"):
        if row["version"] == "v3":
            claims.append(f"{row['factor']:g}x {row['claim']}")
    notes = (
        "Target: each seed's dense run at its best score. A routed run's cost counts to the first "
        "scored step that is as good, so it counts whole scoring intervals and is coarser than "
        "s\u00b7m, which interpolates between scores; routed runs that reach it at their only "
        "scored step are left out. Geometric mean over seeds that reach it, Student's 95 % "
        "interval on logarithms.",
        f"The paper's factors ({'; '.join(claims)}) are ratios of training time and have no "
        f"counterpart here: {paper.citation('speedup')}.",
    )
    title = "Steps and multiply-adds to the dense run's best score"
    return build("speedup", title, columns, rows, notes)


def _says_nothing(reached: pd.DataFrame, routed: Variant) -> bool:
    """Return whether routed runs reach the target, but each at the one step it was scored at."""
    lengths = [len(routed.curves[seed]) for seed in reached.index]
    return bool(reached["reached"].any()) and max(lengths) == 1


def headline_entries(group: Group, dense: Variant, routed: Variant) -> dict[str, Entry]:
    """Return speed-ups by cost (`step`, `macs`), the `target` and the `seeds` that reach it."""
    reached = reach(group, dense, routed)
    counts = sorted({len(routed.curves[seed]) for seed in reached.index})
    scored = f", {'-'.join(map(str, counts))} scored" if counts else ""
    target = mean_std(reached["target"]) or dense.estimate()
    return {
        **{cost: speedup(reached, cost) for cost in COSTS},
        "seeds": Entry(f"{reached['reached'].sum()} of {len(reached)}{scored}"),
        "target": measured(target, entries.metric_decimals(group.metric)),
    }


def speedup(reached: pd.DataFrame, cost: str) -> Entry:
    """Return the mean speed-up, by one cost, over the seeds that reach the target."""
    estimate = ratio(reached[cost])
    if estimate:
        return replace(measured(estimate, unit="x"), of=len(reached))
    if reached.empty or reached["reached"].any():
        return measured(None)
    return Entry("not reached")


# --- equal cost -----------------------------------------------------------------------------------


def masking(results: Results) -> Table:
    """Dense, routed, dropping and masking at equal steps and at equal FLOPs."""
    published = {}
    for row in paper.rows("masking"):
        if row["steps_k"] == 400:
            published[row["method"]] = row["fid"]
    rows: list[RowValues] = []
    mixed = has_paper = False
    for group in results.groups:
        heading = entries.heading(group)
        # After unequal steps no entry is marked as the best; at equal cost one is.
        mixed = mixed or heading.mixed
        if len({variant.first("method") for variant in group.routed}) < 2:
            continue
        beside = published if paper.matches(group, "masking") else {}
        has_paper = has_paper or bool(beside)
        for variant, values in _equal_cost(group):
            paper_name = _PAPER_METHODS.get(str(variant.first("method")), "")
            values += [*entries.scores(group, variant), beside.get(paper_name)]
            rows.append((str(heading), [variant.name, *values]))
    notes = entries.paper_notes(
        "masking",
        "Budgets are the least that every seed of every row spent, so that all rows are read at "
        "the same cost; scores between two scored steps are interpolated linearly. Every "
        "\u0394 is to the dense runs at that cost.",
        PAIRED,
        *entries.nn_ratio_notes(results),
        shown=has_paper or not rows,
    )
    columns = _masking_columns(results, mixed, has_paper or not rows)
    not_run = [(name, [fid]) for name, fid in published.items()]
    title = "Routing against dropping and masking"
    return build("masking", title, columns, rows, notes, not_run)


def _masking_columns(results: Results, mixed: bool, has_paper: bool) -> Sequence[Column]:
    better = entries.better_end(results)
    columns = [Column("Tokens", numeric=False)]
    for budget in _BUDGETS.values():
        columns += [Column(f"Equal {budget}", better=better), Column(f"\u0394 {budget}")]
    columns += [Column("Own end", better=None if mixed else better), Column("\u0394 own end")]
    columns += entries.nn_ratio_columns(results, "NN-distance ratio")
    return [*columns, Column("Paper (400K)", published=True, shown=has_paper)]


def _equal_cost(group: Group) -> list[tuple[Variant, list[Value]]]:
    """Return the scores and differences to dense at each budget, per method of a group."""
    variants = []
    for variant in group.variants:
        # The dense run, the guideline's route and every other method.
        if variant.first("method") != "TREAD" or variant is group.guideline():
            variants.append(variant)
    last = []
    for variant in variants:
        for curve in variant.curves.values():
            last.append(curve.iloc[-1])
    # Runs that logged no cost count in no budget of that cost: NaN is left out.
    budgets = pd.DataFrame(last, columns=list(_BUDGETS)).min()
    digits = entries.metric_decimals(group.metric)
    rows = []
    for variant in variants:
        values: list[Value] = []
        for cost in _BUDGETS:
            scores = _scores_at(variant, cost, budgets[cost])
            values.append(measured(mean_std(scores.values()), digits))
            if variant is group.baseline:
                values.append("")
                continue
            dense = _scores_at(group.baseline, cost, budgets[cost]) if group.baseline else {}
            values.append(measured(paired(dense, scores), digits, signed=True))
        rows.append((variant, values))
    return rows


def _scores_at(variant: Variant, cost: str, budget: float) -> dict[int, float]:
    """Return seed to score at a budget; a seed that was first scored beyond it is left out."""
    scores = {}
    for seed, curve in variant.curves.items():
        points = curve.dropna(subset=[cost])
        if len(points) and points[cost].iloc[0] <= budget * (1 + 1e-9):  # False for a NaN budget
            scores[seed] = float(np.interp(budget, points[cost], points["value"]))
    return scores
