"""Throughput: images per second of runs and of timed steps against what multiply-adds allow."""

from pathlib import Path
from typing import Any

from analysis.runs.cells import Base, Cell, Study, same_machine
from analysis.runs.run_files import is_number
from analysis.runs.statistics import ratio
from analysis.tables import paper
from analysis.tables.score_entries import OTHER_MACHINE, paper_notes
from analysis.tables.table import Column, Entry, Table, build, exact, missing, not_run, ours, words
from routing.parsing import json_of

# What `experiments/bench.py` and the sweep `bench` write below a runs folder.
_PLACES = ("bench*.json", ".sweeps/*/outputs/*.json")
_LARGEST = 10_000_000  # bytes; a benchmark's file has thousands
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


def throughput(study: Study) -> Table:
    """Images per second, dense and routed, against what the multiply-adds allow."""
    columns = (
        Column("Run as", numeric=False),
        *Column.each("GMACs per image", "GMACs, paper's count"),
        Column("Images/s", better="higher"),
        *Column.each("Speed-up", "MACs allow", "Share of it"),
        Column("Paper speed-up", numeric=False, published=True),
    )
    speeds = paper.table("speed").set_index("method")["steps_per_s"]
    text = f"{speeds['TREAD'] / speeds['DiT']:.2f}x (DiT-XL/2)"
    rows = []
    for base in study.bases:
        rows += [(base.label, _throughput_row(base, cell, text)) for cell in base.cells]
    timed, damaged = _timed_rows(study.runs.attrs.get("root", "."), text)
    rows = rows + timed or [not_run(columns, [words(text)])]
    shares = [entries[6].value for _, entries in rows]
    doubtful = any(share is not None and share > _DOUBTFUL for share in shares)
    notes = paper_notes(
        "speed",
        *([_TIMED] if timed else []),
        *([_BUSY] if doubtful else []),
        *([f"Benchmarks that cannot be read: {', '.join(damaged)}."] if damaged else []),
        "GMACs are multiply-adds of one forward pass per image, with attention matmuls; the "
        "paper's count leaves them out.",
        "Images/s is measured over whole runs on whatever machine made them: compare rows of one "
        "machine only.",
    )
    title = "Throughput: what routing promises and what the clock shows"
    return build("throughput", title, columns, rows, notes)


def _timed_rows(root: str | Path, text: str) -> tuple[list[tuple[str, list[Entry]]], list[str]]:
    """Return a row per timed step below a runs folder, and the files that cannot be read."""
    rows: list[tuple[str, list[Entry]]] = []
    damaged: list[str] = []
    for path in sorted(path for place in _PLACES for path in Path(root).glob(place)):
        try:
            if path.stat().st_size > _LARGEST:
                raise ValueError("too large")
            record = json_of(path.read_bytes())
            about = f"batch {record['options']['batch']}, {record['options']['precision']}"
            machine = record["environment"]
            # The other parts of a benchmark (a step's shares, single blocks) are no throughput.
            rows += [_timed_row(row, about, machine, text) for row in record.get("steps", [])]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            damaged.append(path.name)
    return rows, damaged


def _timed_row(
    row: dict[str, Any], about: str, machine: dict[str, Any], text: str
) -> tuple[str, list[Entry]]:
    group = (
        f"Step times: {row['backbone']}-{row['size']}, {row['tokens']} tokens, {about}, "
        f"{machine['device_name']}, {machine['threads']} threads, torch {machine['torch']}"
    )
    macs, speed = exact(_number(row["macs_per_image"]) / 1e9, 4), _number(row["images_per_s"])
    routed = [words("")] * 4
    if "speedup" in row and "allowed" in row:
        speedup, allowed = _number(row["speedup"]), _number(row["allowed"])
        routed = [
            exact(speedup, 2, unit="x"),
            exact(allowed, 2, unit="x"),
            exact(speedup / allowed, 2),
            words(text if row["backbone"] == "dit" else "not published"),
        ]
    name = words(row["route"] if "speedup" in row else "dense")
    return group, [name, macs, words(""), exact(speed, 1), *routed]


def _number(value: Any) -> float:
    if not is_number(value):
        raise TypeError(f"{value!r} is no number")
    if value <= 0:
        raise ValueError(f"{value} is no time, speed or count")
    return float(value)


def _throughput_row(base: Base, cell: Cell, text: str) -> list[Entry]:
    dense = cell is base.dense
    side = "macs_dense" if dense else "macs_routed"
    macs, lean = (cell.estimate(column) for column in (side, f"{side}_no_attention"))
    entries = [
        words(cell.treatment),
        *(exact(count.mean / 1e9 if count else None, 4) for count in (macs, lean)),
        ours(cell.estimate("throughput"), 1),
    ]
    if dense:
        return [*entries, *[words("")] * 4]
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
    return [*entries, clock, exact(allowed, 2, unit="x"), share, words(paper_text)]
