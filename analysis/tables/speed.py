"""Throughput, and routing against dropping and masking (TREAD v1, Table 3)."""

from __future__ import annotations

import numpy as np

from analysis import paper
from analysis.groups import Base, Cell
from analysis.stats import Estimate, mean_std, ratio
from analysis.study import Study
from analysis.table import Column, Entry, Table, build, exact, missing, ours, published, words
from analysis.tables.common import decimals, heading, score


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
    if not rows:
        rows = [("", [words("none run"), *[missing()] * 6, words(text)])]
    notes = (
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
    paper_text = text if base.any.first("backbone") == "dit" else "not published"
    return [
        *entries,
        ours(speedup, 2, unit="x"),
        exact(allowed, 2, unit="x"),
        share,
        words(paper_text),
    ]


def _giga(estimate: Estimate | None) -> Entry:
    return missing() if estimate is None else Entry(value=estimate.mean / 1e9, decimals=4)


_BASELINES = {"dense": "DiT", "TREAD": "TREAD-2", "MaskDiT": "MaskDiT"}


def masking(study: Study) -> Table:
    """Dense, routed, dropping and masking at equal steps, equal FLOPs and equal time."""
    columns = (
        Column("Tokens", numeric=False),
        Column("Equal steps", better="lower"),
        Column("Equal FLOPs", better="lower"),
        Column("Equal time", better="lower"),
        Column("Own end", better="lower"),
        Column("Hours"),
        Column("Paper (400K)", published=True),
        Column("Paper hours", published=True),
    )
    known = paper.table("masking")
    known = known[known["steps_k"] == 400].set_index("method")
    rows = []
    for base in study.bases:
        if len({str(cell.first("variant")) for cell in base.routed}) < 2:
            continue
        budget = _budget(study, base)
        for cell in base.cells:
            if cell is base.dense or cell.first("variant") != "TREAD" or cell is base.auto():
                rows.append(
                    (
                        heading(base),
                        [*_masking_row(study, base, cell, budget), *_published(known, cell)],
                    )
                )
    if not rows:
        for name, row in known.iterrows():
            entries = [
                words(name),
                *[missing()] * 5,
                published(row["fid"]),
                published(row["hours"]),
            ]
            rows.append(("Of the paper, not run here", entries))
    notes = (
        "Budgets are the least that every seed of every row spent, so that all rows are read at "
        "the same cost; scores "
        "between two scored steps are interpolated linearly.",
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


def _budget(study: Study, base: Base) -> dict[str, float]:
    ends = [study.path(base, str(run)) for cell in base.cells for run in cell.runs["run"]]
    ends = [path for path in ends if not path.empty]
    return {
        cost: min((float(path[cost].iloc[-1]) for path in ends), default=np.nan)
        for cost in ("step", "macs", "hours")
    }


def _masking_row(study: Study, base: Base, cell: Cell, budget: dict[str, float]) -> list[Entry]:
    entries = [words(cell.treatment)]
    for cost in ("step", "macs", "hours"):
        values = [_score_at(study, base, str(run), cost, budget[cost]) for run in cell.runs["run"]]
        entries.append(ours(mean_std([v for v in values if v is not None]), decimals(base)))
    hours = mean_std([v / 3600 for v in cell.by_seed("wall_s").values()])
    return [*entries, score(base, cell), ours(hours, 3)]


def _score_at(study: Study, base: Base, run: str, cost: str, budget: float) -> float | None:
    path = study.path(base, run)
    known = path.dropna(subset=[cost]) if not path.empty else path
    # A run that was first scored beyond the budget says nothing about it.
    if known.empty or not np.isfinite(budget) or float(known[cost].iloc[0]) > budget * (1 + 1e-9):
        return None
    return float(np.interp(budget, known[cost], known["value"]))
