"""What a score costs: the headline saving, methods at equal cost, multiply-adds, timed steps.

Speed-up: per seed, the target is the dense run's best score and its cost the step at which that was
scored; the routed run's cost is the first step at which it scored as well or better (only scored
steps count: no interpolation, so the speed-up is never flattered). The ratio of the two, in steps
and in training multiply-adds, is averaged over seeds geometrically, with Student's 95 % interval on
the logarithms. Seeds that never get there are counted and shown.

The wall-clock time of training runs is in no table: it reflects what else ran on the machine.
`experiments/bench.py` times dense and routed steps in turn.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.runs.cells import Base, Cell, Study
from analysis.runs.seed_statistics import mean_std, paired, ratio
from analysis.tables import paper
from analysis.tables import table as tables
from analysis.tables.table import Column, Entry, Table, Value, build, ours
from experiments.runtime.parsing import json_of

COSTS = ("step", "macs")


def reach(base: Base, dense: Cell, routed: Cell) -> pd.DataFrame:
    """Return what each paired seed spent to the dense run's best score, its `target`.

    A row per seed: `dense_COST` and `routed_COST` (NaN where that never gets `there`), and their
    ratio `COST`.
    """
    rows = {}
    for seed in sorted(dense.paths.keys() & routed.paths):
        one, two = dense.paths[seed], routed.paths[seed]
        sign = 1.0 if base.better == "lower" else -1.0
        best = one.iloc[(sign * one["value"]).argmin()]
        there = two[sign * two["value"] <= sign * best["value"]]
        spent = there.iloc[0] if len(there) else dict.fromkeys(COSTS, float("nan"))
        row = {"target": best["value"], "there": len(there) > 0}
        for cost in COSTS:
            row |= {f"dense_{cost}": best[cost], f"routed_{cost}": spent[cost]}
            row[cost] = best[cost] / spent[cost] if spent[cost] > 0 else float("nan")
        rows[seed] = row
    sides = [f"{side}{cost}" for cost in COSTS for side in ("dense_", "routed_", "")]
    return pd.DataFrame.from_dict(rows, orient="index", columns=["target", "there", *sides])


def headline(study: Study) -> Table:
    """Speed-up to the dense run's best score, per backbone and treatment."""
    columns = (
        Column("Routed as", numeric=False),
        Column("Dense best"),
        Column("Seeds that reach it, scored steps", numeric=False),
        *Column.each("Speed-up, steps", "Speed-up, FLOPs", better="higher"),
    )
    known = [row for row in paper.rows("speedup") if row["version"] == "v3"]
    claims = "; ".join(f"{row['factor']:g}x {row['claim']}" for row in known)
    rows: list[tuple[str, list[Value]]] = []
    for base in study.bases:
        if base.dense is None:
            continue
        for routed in base.routed:
            found = headline_cell(base, base.dense, routed)
            entries = [found[key] for key in ("target", "seeds", *COSTS)]
            rows.append((tables.heading(base), [routed.treatment, *entries]))
    notes = (
        "Target: each seed's dense run at its best score. A routed run's cost counts to the first "
        "scored step that is as good: a run that was scored once can reach it at its end alone. "
        "Geometric mean over seeds that reach it, Student's 95 % interval on logarithms.",
        f"The paper's factors ({claims}) are ratios of training time and have no counterpart "
        f"here: {paper.citation('speedup')}.",
    )
    title = "Steps and multiply-adds to the dense run's best score"
    return build("speedup", title, columns, rows, notes)


def headline_cell(base: Base, dense: Cell, routed: Cell) -> dict[str, Entry]:
    """Return speed-ups by cost (`step`, `macs`), `target` and `seeds` there."""
    reached = reach(base, dense, routed)
    counts = sorted({len(routed.paths[seed]) for seed in reached.index})
    scored = f", {'-'.join(map(str, counts))} scored" if counts else ""
    target = mean_std(list(reached["target"])) or dense.estimate(base.score)
    entries = {cost: speedup(reached, cost) for cost in COSTS}
    entries["seeds"] = Entry(f"{reached['there'].sum()} of {len(reached)}{scored}")
    return entries | {"target": ours(target, tables.metric_decimals(base.metric))}


def speedup(reached: pd.DataFrame, cost: str) -> Entry:
    """Return the mean speed-up, by one cost, over the seeds that reach the target."""
    if estimate := ratio(list(reached[cost])):
        return replace(ours(estimate, unit="x"), of=len(reached))
    return ours(None) if reached.empty or reached["there"].any() else Entry("not reached")


_BASELINES = {"dense": "DiT", "TREAD": "TREAD-2", "MaskDiT": "MaskDiT"}
_BUDGETS = {"step": "steps", "macs": "FLOPs"}


def masking(study: Study) -> Table:
    """Dense, routed, dropping and masking at equal steps and at equal FLOPs."""
    end = tables.better_end(study)
    # Whoever went on for longer is not the better one for it; at equal cost there is a best.
    mixed = any(tables.heading(base).mixed for base in study.bases)
    columns = [Column("Tokens", numeric=False)]
    for what in _BUDGETS.values():
        columns += [Column(f"Equal {what}", better=end), Column(f"\u0394 {what}")]
    columns += [Column("Own end", better=None if mixed else end), Column("\u0394 own end")]
    columns += [*tables.memory_columns(study, "NN-distance ratio")]
    columns += [Column("Paper (400K)", published=True)]
    known = {row["method"]: row for row in paper.rows("masking") if row["steps_k"] == 400}
    rows: list[tuple[str, list[Value]]] = []
    for base in study.bases:
        if len({str(cell.first("variant")) for cell in base.routed}) < 2:
            continue
        # The dense run, the guideline's route and every other method.
        cells = [c for c in base.cells if c.first("variant") != "TREAD" or c is base.auto()]
        every = [path for cell in cells for path in cell.paths.values()]
        # Runs that logged no cost have none here: NaN is left out.
        budget = pd.DataFrame([path.iloc[-1] for path in every], columns=list(_BUDGETS)).min()
        digits = tables.metric_decimals(base.metric)
        for cell in cells:
            entries: list[Value] = [cell.treatment]
            for cost in _BUDGETS:
                values = _scores_at(cell, cost, budget[cost])
                dense = _scores_at(base.dense, cost, budget[cost]) if base.dense else {}
                delta = ours(paired(dense, values), digits, signed=True)
                entries.append(ours(mean_std(list(values.values())), digits))
                entries.append("" if cell is base.dense else delta)
            row = known.get(_BASELINES.get(str(cell.first("variant")), ""), {})
            entries += [*tables.scores(base, cell), row.get("fid")]
            rows.append((str(tables.heading(base)), entries))
    unrun = [(name, [row["fid"]]) for name, row in known.items()]
    notes = tables.paper_notes(
        "masking",
        "Budgets are the least that every seed of every row spent, so that all rows are read at "
        "the same cost; scores between two scored steps are interpolated linearly. Every "
        "\u0394 is to the dense runs at that cost.",
        tables.PAIRED,
        *tables.memory_notes(study),
    )
    return build("masking", "Routing against dropping and masking", columns, rows, notes, unrun)


def _scores_at(cell: Cell, cost: str, budget: float) -> dict[int, float]:
    """Return seed to score at a budget; a seed that was first scored beyond it is left out."""
    found = {}
    for seed, path in cell.paths.items():
        known = path.dropna(subset=[cost])
        if len(known) and known[cost].iloc[0] <= budget * (1 + 1e-9):  # NaN: no budget
            found[seed] = float(np.interp(budget, known[cost], known["value"]))
    return found


# --- multiply-adds of a step, and training steps that were timed ----------------------------------


def throughput(study: Study) -> Table:
    """Multiply-adds of a forward pass, dense and routed, and the speed-up that they allow."""
    columns = (
        Column("Run as", numeric=False),
        *Column.each("GMACs per image", "GMACs, paper's count", decimals=4),
        Column("MACs allow", unit="x"),
    )
    rows: list[tuple[str, list[Value]]] = []
    for base, cell in ((one, cell) for one in study.bases for cell in one.cells):
        dense = cell is base.dense
        side = "macs_dense" if dense else "macs_routed"
        macs, lean = (cell.estimate(column) for column in (side, f"{side}_no_attention"))
        entries: list[Value] = [count.mean / 1e9 if count else None for count in (macs, lean)]
        full = cell.estimate("macs_dense")
        allowed = full.mean / macs.mean if full and macs and macs.mean else None
        rows.append((base.label, [cell.treatment, *entries, "" if dense else allowed]))
    notes = (
        "GMACs are multiply-adds of one forward pass per image, with attention matmuls; the "
        "paper's count leaves them out.",
        "MACs allow: multiply-adds of a dense step over those of a routed one, an upper limit of "
        "the speed-up. Measured speed is in the table of timed steps (experiments/bench.py).",
    )
    title = "Multiply-adds: what routing saves of a step"
    return build("throughput", title, columns, rows, notes)


_VARIANTS = {
    "torch": "Without native operations",
    "bf16": "bf16",
    "compiled": "Compiled",
    "bf16+compiled": "bf16, compiled",
}


def benchmarks(study: Study) -> list[Path]:
    """Return the files that `experiments/bench.py` and the sweep `bench` wrote below the runs."""
    root = Path(study.runs.attrs.get("root", "."))
    return sorted([*root.glob("bench*.json"), *root.glob(".sweeps/*/outputs/*.json")])


def benchmark(study: Study) -> Table:
    """Training steps as experiments/bench.py times them: dense, routed and run otherwise."""
    rows: list[tuple[str, list[Value]]] = []
    damaged: list[str] = []
    for path in benchmarks(study):
        try:
            if path.stat().st_size > 10_000_000:  # a benchmark's file has thousands of bytes
                raise ValueError("too large")
            rows += _benchmark_rows(json_of(path.read_bytes()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            damaged.append(path.name)
    columns = (
        Column("Step", numeric=False),
        Column("ms", decimals=1),
        *Column.each("Routed over dense", "MACs allow", "Share of it", unit="x"),
        *Column.each(*_VARIANTS.values(), "Over plain DiT", unit="x"),
    )
    notes = (
        "Forward, backward and update, in turn in one process; ratios are medians of those within "
        "a round. The last columns: how many times as fast as the step itself it is otherwise; "
        "how many times as fast as a plain reimplementation of the official DiT's structure.",
        *([f"Benchmarks that cannot be read: {', '.join(damaged)}."] if damaged else []),
    )
    title = "Training steps: what routing, native operations, bf16 and compiling gain"
    return build("benchmark", title, columns, rows, notes)


def _benchmark_rows(record: dict[str, Any]) -> list[tuple[str, list[Value]]]:
    options, machine = record["options"], record["environment"]
    about = f"batch {options['batch']}, {options['precision']}"
    about += ", compiled" if options["compile"] == "blocks" else ""
    about += f", {options['depth']} blocks" if options["depth"] else ""
    threads = f"{machine['threads']} thread{'s' * (machine['threads'] != 1)}"
    place = f"{machine['device_name']}, {threads}, torch {machine['torch']}"
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in [*record.get("variants", []), *record.get("steps", [])]:
        plain = row["backbone"] == "plain"
        name = "dit" if plain else row["backbone"]
        known = found.setdefault(
            (f"{name}-{row['size']}, {row['tokens']} tokens", row["route"]), {}
        )
        known |= {"plain": row["ours_faster_by"]} if plain else row
    rows: list[tuple[str, list[Value]]] = []
    for (step, route), row in found.items():
        if "seconds" in row:
            ratio, allowed = row.get("speedup"), row.get("allowed")
            numbers = [ratio, allowed, ratio / allowed if ratio and allowed else None]
            numbers += [*map(row.get("faster", {}).get, _VARIANTS), row.get("plain")]
            entries: list[Value] = [f"{step}, {'dense' if route == 'none' else route}"]
            entries.append(1e3 * float(row["seconds"]))
            entries += ["" if n is None else float(n) for n in numbers]
            rows.append((f"{about}, {options['clock']} clock: {place}", entries))
    return rows
