"""Throughput, and routing against dropping and masking (TREAD v1, Table 3)."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.runs.cells import Base, Cell, Study, same_machine
from analysis.runs.statistics import Estimate, mean_std, paired, ratio
from analysis.tables import paper
from analysis.tables.headings import (
    OTHER_MACHINE,
    PAIRED,
    better_end,
    decimals,
    difference,
    heading,
    score,
)
from analysis.tables.memorisation import Memory
from analysis.tables.step_timings import Timing, timings
from analysis.tables.table import (
    NOT_RUN,
    Column,
    Entry,
    Table,
    build,
    exact,
    missing,
    ours,
    published,
    words,
)


def throughput(study: Study) -> Table:
    """Images per second, dense and routed, against what the multiply-adds allow."""
    columns = (
        Column("Run as", numeric=False),
        Column("GMACs per image"),
        Column("GMACs, paper's count"),
        Column("Images/s", better="higher"),
        Column("Speed-up"),
        Column("MACs allow"),
        Column("Share of it"),
        Column("Paper speed-up", numeric=False, published=True),
    )
    speeds = paper.table("speed").set_index("method")["steps_per_s"]
    text = f"{speeds['TREAD'] / speeds['DiT']:.2f}x (DiT-XL/2)"
    rows = []
    for base in study.bases:
        for cell in base.cells:
            rows.append((base.label, _throughput_row(base, cell, text)))
    timed, damaged = timings(study.runs.attrs.get("root", "."))
    rows += [(f"Step times: {step.group}", _timed_row(step, text)) for step in timed]
    if not rows:
        rows = [("", [words("none run"), *[missing()] * 6, words(text)])]
    shares = [entries[6].value for _, entries in rows]
    doubtful = any(share is not None and share > _DOUBTFUL for share in shares)
    notes = (
        *([_TIMED] if timed else []),
        *([_BUSY] if doubtful else []),
        *([f"Benchmarks that cannot be read: {', '.join(damaged)}."] if damaged else []),
        "GMACs are multiply-adds of one forward pass per image, with attention matmuls; the "
        "paper's count leaves them out.",
        "Images/s is measured over whole runs on whatever machine made them: compare rows of one "
        "machine only.",
        f"Paper: {paper.citation('speed')}.",
        str(paper.table("speed").attrs["note"]),
    )
    return build(
        "throughput",
        "Throughput: what routing promises and what the clock shows",
        columns,
        rows,
        notes,
    )


# Speed-ups beyond what the multiply-adds allow do not come from routing.
_DOUBTFUL = 1.05
_BUSY = (
    "Some routed runs are faster than their multiply-adds allow: the machine was busier during the "
    "dense runs, so no clock time of these runs is to be trusted; step times of "
    "experiments/bench.py are taken in turn."
)
_TIMED = (
    "Step times are experiments/bench.py's: forward, backward and update alone, dense and routed "
    "in turn; their speed-up is the median of the ratios within a round."
)


def _timed_row(step: Timing, text: str) -> list[Entry]:
    entries = [
        words("dense" if step.speedup is None else step.route),
        exact(step.macs / 1e9, 4),
        words(""),
        exact(step.images_per_s, 1),
    ]
    if step.speedup is None or step.allowed is None:
        return [*entries, words(""), words(""), words(""), words("")]
    return [
        *entries,
        exact(step.speedup, 2, unit="x"),
        exact(step.allowed, 2, unit="x"),
        exact(step.speedup / step.allowed, 2),
        words(text if step.backbone == "dit" else "not published"),
    ]


def _throughput_row(base: Base, cell: Cell, text: str) -> list[Entry]:
    dense = cell is base.dense
    side = "macs_dense" if dense else "macs_routed"
    macs, lean = cell.estimate(side), cell.estimate(f"{side}_no_attention")
    entries = [
        words(cell.treatment),
        _giga(macs),
        _giga(lean),
        ours(cell.estimate("throughput"), 1),
    ]
    if dense:
        return [*entries, words(""), words(""), words(""), words("")]
    first = base.dense.by_seed("throughput") if base.dense else {}
    second = cell.by_seed("throughput")
    speedup = ratio(
        [second[s] / first[s] for s in sorted(set(first) & set(second)) if first[s] > 0]
    )
    full = cell.estimate("macs_dense")
    allowed = full.mean / macs.mean if full and macs and macs.mean else None
    share = exact(speedup.mean / allowed, 2) if speedup and allowed else missing()
    clock = ours(speedup, 2, unit="x")
    if base.dense and not same_machine(base.dense, cell):
        clock, share = OTHER_MACHINE, words("")
    paper_text = text if base.any.first("backbone") == "dit" else "not published"
    return [
        *entries,
        clock,
        exact(allowed, 2, unit="x"),
        share,
        words(paper_text),
    ]


def _giga(estimate: Estimate | None) -> Entry:
    return missing() if estimate is None else Entry(value=estimate.mean / 1e9, decimals=4)


_BASELINES = {"dense": "DiT", "TREAD": "TREAD-2", "MaskDiT": "MaskDiT"}


_BUDGETS = {"step": "steps", "macs": "FLOPs", "hours": "time"}


def masking(study: Study) -> Table:
    """Dense, routed, dropping and masking at equal steps, equal FLOPs and equal time."""
    memory, end = Memory.of(study), better_end(study)
    # Whoever went on for longer is not the better one for it; at equal cost there is a best.
    heads = [heading(base) for base in study.bases]
    mixed = any(head.mixed for head in heads)
    columns = (
        Column("Tokens", numeric=False),
        *(
            column
            for what in _BUDGETS.values()
            for column in (Column(f"Equal {what}", better=end), Column(f"\u0394 {what}"))
        ),
        Column("Own end", better=None if mixed else end),
        Column("\u0394 own end"),
        *memory.columns("Memorisation"),
        Column("Hours"),
        Column("Paper (400K)", published=True),
        Column("Paper hours", published=True),
    )
    known = paper.table("masking")
    known = known[known["steps_k"] == 400].set_index("method")
    rows = []
    for base, head in zip(study.bases, heads, strict=True):
        if len({str(cell.first("variant")) for cell in base.routed}) < 2:
            continue
        for cell, entries in _masking_rows(study, base, memory):
            rows.append((str(head), [*entries, *_published(known, cell)]))
    if not rows:
        for name, row in known.iterrows():
            blank = [missing()] * (len(columns) - 3)
            entries = [words(name), *blank, published(row["fid"]), published(row["hours"])]
            rows.append((NOT_RUN, entries))
    notes = (
        "Budgets are the least that every seed of every row spent, so that all rows are read at "
        "the same cost; scores between two scored steps are interpolated linearly. Every "
        "\u0394 is to the dense runs at that cost.",
        PAIRED,
        *memory.notes,
        f"Paper: {paper.citation('masking')}.",
        str(paper.table("masking").attrs["note"]),
    )
    return build("masking", "Routing against dropping and masking", columns, rows, notes)


def _published(known: object, cell: Cell) -> list[Entry]:
    name = _BASELINES.get(str(cell.first("variant")))
    if name is None or name not in known.index:  # type: ignore[attr-defined]
        return [published(None), published(None)]
    row = known.loc[name]  # type: ignore[attr-defined]
    return [published(row["fid"]), published(row["hours"])]


def _masking_rows(study: Study, base: Base, memory: Memory) -> list[tuple[Cell, list[Entry]]]:
    """Return the dense run, the guideline's route and every other method, with their entries."""
    cells = [
        cell
        for cell in base.cells
        if cell is base.dense or cell.first("variant") != "TREAD" or cell is base.auto()
    ]
    paths = {cell.treatment: study.by_seed(base, cell) for cell in cells}
    every = [path for by_seed in paths.values() for path in by_seed.values()]
    budget = {
        cost: min((float(path[cost].iloc[-1]) for path in every), default=np.nan)
        for cost in _BUDGETS
    }
    at = {
        (cell.treatment, cost): _scores_at(paths[cell.treatment], cost, budget[cost])
        for cell in cells
        for cost in _BUDGETS
    }
    digits = decimals(base)
    rows = []
    for cell in cells:
        entries = [words(cell.treatment)]
        for cost in _BUDGETS:
            values = at[cell.treatment, cost]
            dense = at[base.dense.treatment, cost] if base.dense else {}
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
