"""Images per second of runs against what multiply-adds allow; training steps that were timed."""

from pathlib import Path
from typing import Any

from analysis.runs.cells import Base, Cell, Study, same_machine
from analysis.runs.statistics import ratio
from analysis.tables import paper
from analysis.tables.score_entries import OTHER_MACHINE, paper_notes
from analysis.tables.table import Column, Entry, Table, build, exact, missing, not_run, ours, words
from routing.parsing import is_number, json_of

_PLACES = ("bench*.json", ".sweeps/*/outputs/*.json")
_LARGEST = 10_000_000  # bytes; a benchmark's file has thousands
# Speed-ups beyond what the multiply-adds allow do not come from routing.
_DOUBTFUL = 1.05
_BUSY = (
    "Some routed runs are faster than their multiply-adds allow: the machine was busier during the "
    "dense runs, so no clock time of these runs is to be trusted; step times of "
    "experiments/bench.py are taken in turn."
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
    rows = rows or [not_run(columns, [words(text)])]
    shares = [entries[6].value for _, entries in rows]
    doubtful = any(share is not None and share > _DOUBTFUL for share in shares)
    notes = paper_notes(
        "speed",
        *([_BUSY] if doubtful else []),
        "GMACs are multiply-adds of one forward pass per image, with attention matmuls; the "
        "paper's count leaves them out.",
        "Images/s is measured over whole runs on whatever machine made them: compare rows of one "
        "machine only.",
    )
    title = "Throughput: what routing promises and what the clock shows"
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
    return sorted(path for place in _PLACES for path in root.glob(place))


def benchmark(study: Study) -> Table:
    """Training steps as experiments/bench.py times them: dense, routed and run otherwise."""
    rows: list[tuple[str, list[Entry]]] = []
    damaged: list[str] = []
    for path in benchmarks(study):
        try:
            if path.stat().st_size > _LARGEST:
                raise ValueError("too large")
            rows += _benchmark_rows(json_of(path.read_bytes()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            damaged.append(path.name)
    columns = (
        Column("Step", numeric=False),
        *Column.each("ms", "Routed over dense", "MACs allow", "Share of it", *_VARIANTS.values()),
        Column("Over plain DiT"),
    )
    notes = (
        "Forward, backward and update, in turn in one process; ratios are medians of those within "
        "a round. The last columns: how many times as fast as the step itself it is otherwise; "
        "how many times as fast as a plain reimplementation of the official DiT's structure.",
        *([f"Benchmarks that cannot be read: {', '.join(damaged)}."] if damaged else []),
    )
    title = "Training steps: what routing, native operations, bf16 and compiling gain"
    return build("benchmark", title, columns, rows or [not_run(columns)], notes)


def _benchmark_rows(record: dict[str, Any]) -> list[tuple[str, list[Entry]]]:
    """Return a row per step of one benchmark's record."""
    options, machine = record["options"], record["environment"]
    about = f"batch {options['batch']}, {options['precision']}"
    about += ", compiled" if options["compile"] == "blocks" else ""
    about += f", {options['depth']} blocks" if options["depth"] else ""
    threads = f"{machine['threads']} thread{'s' * (machine['threads'] != 1)}"
    place = f"{machine['device_name']}, {threads}, torch {machine['torch']}"
    found: dict[tuple[str, str], dict[str, Any]] = {}
    plain: dict[tuple[str, str], float] = {}
    for row in [*record.get("variants", []), *record.get("steps", [])]:
        name = "dit" if row["backbone"] == "plain" else row["backbone"]
        key = f"{name}-{row['size']}, {row['tokens']} tokens", row["route"]
        if row["backbone"] == "plain":
            plain[key] = row["ours_faster_by"]
        else:
            found[key] = found.get(key, {}) | row
    rows = []
    for (step, route), row in found.items():
        faster, allowed = row.get("faster", {}), row.get("allowed")
        ratio = row.get("speedup")
        numbers = [ratio, allowed, ratio / allowed if ratio and allowed else None]
        numbers += [faster.get(name) for name in _VARIANTS]
        numbers.append(plain.get((step, route)))
        entries = [words(f"{step}, {'dense' if route == 'none' else route}")]
        entries.append(exact(1e3 * _number(row["seconds"]), 1))
        rows.append((
            f"{about}, {options['clock']} clock: {place}",
            entries + [words("") if n is None else exact(_number(n), 2, unit="x") for n in numbers],
        ))  # fmt: skip
    return rows


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
