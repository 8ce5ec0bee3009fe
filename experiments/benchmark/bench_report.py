"""Run the parts of the benchmark, print them as tables, write them as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from backbones.ops import native
from experiments.benchmark import step_times
from experiments.benchmark.bench_options import BenchError, BenchOptions
from experiments.runtime.environment import timing_environment
from experiments.runtime.errors import is_out_of_memory
from experiments.runtime.files import atomic_write, check_replaceable
from experiments.runtime.memory import MemoryLimit, check_fits

NOTES = (
    "variants: how many times as fast as the step itself, median of the ratios within a round.",
    "speed-up: dense over routed, median of the ratios within a round; allowed: of multiply-"
    "accumulates, all blocks, embeddings and head.",
    "FLOP/s: 2 per multiply-accumulate, backward counted as twice forward, element-wise work not "
    "counted; peak: a big matmul on the same device in the same rounds.",
    "memory: the step's peak on CUDA; on a CPU weights, gradients, moments, EMA and what the "
    "forward pass keeps.",
)


Column = tuple[str, float, str]  # a key of a row, a factor and a format


def table(rows: Sequence[dict[str, Any]], columns: Mapping[str, Column]) -> str:
    """Format rows as text, the first column to the left, the others to the right."""
    frame = pd.json_normalize(rows).dropna(axis=1, how="all")
    cells = pd.DataFrame(index=frame.index)
    for title, (key, factor, form) in columns.items():
        if key in frame:
            cells[title] = (frame[key] * factor).map(form.format, na_action="ignore")
    first = cells.columns[0]
    return cells.fillna("").set_index(first).rename_axis(index=None, columns=first).to_string()


def pick_device(o: BenchOptions) -> torch.device:
    """Resolve `device` and set threads and matmul precision."""
    if o.threads is not None:
        torch.set_num_threads(o.threads)
    cuda = torch.cuda.is_available()
    if o.device == "cuda" and not cuda:
        raise BenchError("device=cuda: torch sees no CUDA device here; type device=cpu")
    device = torch.device("cuda" if cuda and o.device != "cpu" else "cpu")
    if o.graphs and device.type != "cuda":
        raise BenchError("graphs=true: CUDA graphs need device=cuda; type graphs=false")
    if o.clock == "cpu" and device.type == "cuda":
        raise BenchError("clock=cpu cannot see a GPU's work: type clock=wall")
    if device.type == "cuda" and "variants" in o.parts and "torch" in o.variants:
        raise BenchError(
            "variants=torch leaves out the CPU's native operations, and device=cuda has none; type "
            "variants=bf16,compiled,bf16+compiled"
        )
    if device.type == "cuda" and o.tf32:
        torch.set_float32_matmul_precision("high")
    return device


STEP = {
    "step": ("step", 1, "{}"),
    "tokens": ("tokens", 1, "{}"),
    "route": ("route", 1, "{}"),
    "ms": ("seconds", 1e3, "{:.1f}"),
}
COST = {
    "img/s": ("images_per_s", 1, "{:.1f}"),
    "speed-up": ("speedup", 1, "{:.2f}x"),
    "allowed": ("allowed", 1, "{:.2f}x"),
    "of allowed": ("of_allowed", 1, "{:.0%}"),
    "GFLOP/s": ("flops_per_s", 1e-9, "{:.0f}"),
    "of peak": ("share_of_peak", 1, "{:.0%}"),
    "memory": ("memory_bytes", 2**-30, "{:.2f} GiB"),
}


def steps_table(rows: Sequence[dict[str, Any]]) -> str:
    """Format rows of `step_times.measure`, or of `step_times.compare`."""
    columns = STEP | COST
    for name in rows[0].get("faster", ()):
        columns[name] = (f"faster.{name}", 1, "{:.2f}x")
    named_rows, lines = [], []
    for row in rows:
        for kernel in row["kernels"]:
            line = f"{row['backbone']} {kernel}"
            if line not in lines:
                lines.append(line)
        named_rows.append(row | {"step": f"{row['backbone']}-{row['size']}"})
        if "ours_faster_by" in row:
            ratio = row["ours_faster_by"]
            lines.append(f"ours over plain dit, route {row['route']}: {ratio:.2f}x as fast")
        for name, ratio in row.get("over_plain", {}).items():
            lines.append(f"ours over plain dit, route {row['route']}, {name}: {ratio:.2f}x as fast")
    return "\n".join([table(named_rows, columns), *lines])


#: How each part is measured, in this order.
PARTS: dict[str, Callable[..., list[dict[str, Any]]]] = {
    "steps": step_times.measure,
    "variants": step_times.compare,
}


def run(o: BenchOptions, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure the requested parts; print them, write them to `o.out`, and return them."""
    device = pick_device(o)
    check_replaceable(Path(o.out))  # before minutes of measuring
    _check_memory(o, device)
    environment = timing_environment(device)
    report: dict[str, Any] = {"options": dataclasses.asdict(o), "environment": environment}
    say(_heading(o, environment))
    build = native.start_build(say) if device.type == "cpu" else None
    if build is not None:
        build.join()  # compilers would slow down what is measured
    for part, measure in PARTS.items():
        if part not in o.parts:
            continue
        rows = report[part] = []
        try:
            for size, tokens in product(o.size, o.tokens):
                rows += measure(o, size, tokens, device)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise MemoryLimit(
                f"out of memory in parts={part}: use a smaller size=, depth=, tokens= or batch="
            ) from error
        say("\n" + steps_table(rows))
        atomic_write(Path(o.out), json.dumps(report, indent=1) + "\n")
    say("\n" + "\n".join(NOTES))
    say(f"figures: {o.out}")
    return report


def _check_memory(o: BenchOptions, device: torch.device) -> None:
    """Refuse steps that cannot fit before the first one is measured."""
    samples = 0 if device.type == "cuda" else o.batch
    for size, tokens in product(o.size, o.tokens):
        for case in step_times.cases(o, size, tokens):
            check_fits(case.cost(o.depth), samples, "a smaller size=, depth=, tokens= or batch=")


def _heading(o: BenchOptions, env: dict[str, Any]) -> str:
    extra = f", compile={o.compile}" if o.compile != "none" else ""
    extra += ", CUDA graphs" if o.graphs else ""
    if env["load_before"] > 1:
        extra += f"; the machine is busy (load {env['load_before']:.1f}): trust ratios only"
    return (
        f"{env['device_name']}, torch {env['torch']}, {env['threads']} threads, {o.precision}, "
        f"batch {o.batch}, {o.clock} clock, {o.rounds} rounds{extra}"
    )
