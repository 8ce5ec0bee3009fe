"""What a step costs: multiply-adds, and training steps that were timed."""

from pathlib import Path
from typing import Any

from analysis.comparison.groups import Variant
from analysis.comparison.results import Results
from analysis.runs.run_files import Damaged, read_json
from analysis.tables.table import Column, RowValues, Table, Value, build

# Headings of the variants of a timed step, by their name in the benchmark's file.
_TIMED = {
    "torch": "Without native operations",
    "bf16": "bf16",
    "compiled": "Compiled",
    "bf16+compiled": "bf16, compiled",
}
# Headings of the comparisons with the plain reimplementation, by their name in the file.
_OVER_PLAIN = {
    "eager": "Over plain DiT",
    "eager, theirs compiled": "Over compiled plain DiT",
    "both compiled": "Both compiled",
}


def throughput(results: Results) -> Table:
    """Multiply-adds of a forward pass, dense and routed, and the speed-up that they allow."""
    columns = (
        Column("Run as", numeric=False),
        *Column.each("GMACs per image", "GMACs, paper's count", decimals=4),
        Column("MACs allow", unit="x"),
    )
    rows: list[RowValues] = []
    for group in results.groups:
        for variant in group.variants:
            values = _cost_values(variant, is_dense=variant is group.baseline)
            rows.append((group.label, [variant.name, *values]))
    notes = (
        "GMACs are multiply-adds of one forward pass per image, with attention matmuls; the "
        "paper's count leaves them out.",
        "MACs allow: multiply-adds of a dense step over those of a routed one, an upper limit of "
        "the speed-up. Measured speed is in the table of timed steps (experiments/bench.py).",
    )
    title = "Multiply-adds: what routing saves of a step"
    return build("throughput", title, columns, rows, notes)


def _cost_values(variant: Variant, is_dense: bool) -> list[Value]:
    column = "macs_dense" if is_dense else "macs_routed"
    macs, macs_no_attention = variant.cost(column), variant.cost(f"{column}_no_attention")
    values: list[Value] = []
    for count in (macs, macs_no_attention):
        values.append(count / 1e9 if count is not None else None)
    dense_macs = variant.cost("macs_dense")
    if is_dense:
        values.append("")
    else:
        values.append(dense_macs / macs if dense_macs and macs else None)
    return values


def benchmarks(results: Results) -> list[Path]:
    """Return the files that `experiments/bench.py` and the sweep `bench` wrote below the runs."""
    paths: list[Path] = []
    for root in results.roots:
        paths += [*root.glob("bench*.json"), *root.glob(".sweeps/*/outputs/*.json")]
    return sorted(paths)


def benchmark(results: Results) -> Table:
    """Training steps as experiments/bench.py times them: dense, routed and run otherwise."""
    rows: list[RowValues] = []
    damaged: list[str] = []
    for path in benchmarks(results):
        try:
            rows += _benchmark_rows(read_json(path))
        except (Damaged, ValueError, KeyError, TypeError, AttributeError):
            damaged.append(path.name)
    columns = (
        Column("Step", numeric=False),
        Column("ms", decimals=1),
        *Column.each("Routed over dense", "MACs allow", "Share of it", unit="x"),
        *Column.each(*_TIMED.values(), *_OVER_PLAIN.values(), unit="x"),
    )
    notes = [
        "Forward, backward and update, in turn in one process; ratios are medians of those within "
        "a round. The last columns: speed of the step with the change named, relative to the timed "
        "step; then its speed relative to a plain reimplementation of the official DiT's structure."
    ]
    if damaged:
        notes.append(f"Benchmarks that cannot be read: {', '.join(damaged)}.")
    title = "Training steps: what routing, native operations, bf16 and compiling gain"
    table = build("benchmark", title, columns, rows, notes)
    # Few benchmarks time the compiled plain reimplementation: empty columns are left out.
    last = len(columns) - len(_OVER_PLAIN)
    timed = [
        any(row.entries[i].value is not None for row in table.rows) for i in range(len(columns))
    ]
    return table.only([i for i in range(len(columns)) if i <= last or timed[i]])


def _benchmark_rows(record: dict[str, Any]) -> list[RowValues]:
    heading = _benchmark_heading(record["options"], record["environment"])
    timed: dict[tuple[str, str], dict[str, Any]] = {}
    for row in [*record.get("variants", []), *record.get("steps", [])]:
        is_plain = row["backbone"] == "plain"
        backbone = "dit" if is_plain else row["backbone"]
        step = f"{backbone}-{row['size']}, {row['tokens']} tokens"
        timed_step = timed.setdefault((step, row["route"]), {})
        over_plain = timed_step.setdefault("over_plain", {})
        over_plain.update(
            {"eager": row["ours_faster_by"]} if is_plain else row.get("over_plain", {})
        )
        if not is_plain:
            timed_step.update(row | {"over_plain": over_plain})
    rows: list[RowValues] = []
    for (step, route), row in timed.items():
        if "seconds" not in row:
            continue
        speedup, allowed = row.get("speedup"), row.get("allowed")
        numbers = [speedup, allowed, speedup / allowed if speedup and allowed else None]
        numbers += [row.get("faster", {}).get(name) for name in _TIMED]
        values: list[Value] = [f"{step}, {'dense' if route == 'none' else route}"]
        values.append(1e3 * float(row["seconds"]))
        numbers += [row["over_plain"].get(name) for name in _OVER_PLAIN]
        for number in numbers:
            values.append("" if number is None else float(number))
        rows.append((heading, values))
    return rows


def _benchmark_heading(options: dict[str, Any], machine: dict[str, Any]) -> str:
    text = f"batch {options['batch']}, {options['precision']}"
    if options["compile"] == "blocks":
        text += ", compiled"
    if options["depth"]:
        text += f", {options['depth']} blocks"
    threads = "1 thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
    device = f"{machine['device_name']}, {threads}, torch {machine['torch']}"
    return f"{text}, {options['clock']} clock: {device}"
