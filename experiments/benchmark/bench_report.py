"""Run the parts of the benchmark, print them as tables, write them as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from experiments.benchmark import step_profile, step_times
from experiments.benchmark.bench_options import BenchError, BenchOptions
from experiments.runtime.files import atomic_write, check_replaceable
from experiments.runtime.memory import keep_freed_memory
from experiments.training.session import processor

NOTES = (
    "variants: how many times as fast as the step itself, median of the ratios within a round.",
    "speed-up: dense over routed, median of the ratios within a round; allowed: of multiply-"
    "accumulates, all blocks, embeddings and head.",
    "FLOP/s: 2 per multiply-accumulate, backward counted as twice forward, element-wise work not "
    "counted; peak: a big matmul on the same device in the same rounds.",
    "memory: the step's peak on CUDA; on a CPU weights, gradients, moments, EMA and what the "
    "forward pass keeps.",
)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out columns, the first to the left and numbers to the right."""
    widths = [max(len(r[i]) for r in (headers, *rows)) for i in range(len(headers))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (headers, *rows)
    )


def environment(device: torch.device) -> dict[str, Any]:
    """What the figures depend on besides the options."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else processor()
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device.type,
        "device_name": name,
        "threads": torch.get_num_threads(),
        "spins": os.environ.get("GOMP_SPINCOUNT"),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


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
    if device.type == "cuda" and "variants" in o.parts and "torch" in o.variants:
        raise BenchError(
            "variants=torch leaves out the CPU's native operations, and device=cuda has none; type "
            "variants=bf16,compiled,bf16+compiled"
        )
    if device.type == "cuda" and o.tf32:
        torch.set_float32_matmul_precision("high")
    if device.type == "cpu":
        keep_freed_memory()  # as a run does
    return device


def steps_table(rows: Sequence[dict[str, Any]]) -> str:
    """Print rows of `step_times.measure`."""
    headers = ["step", "tokens", "route", "ms", "img/s", "speed-up", "allowed", "of allowed"]
    headers += ["GFLOP/s", "of peak", "memory"]
    lines = []
    for r in rows:
        routed = "speedup" in r
        line = [f"{r['backbone']}-{r['size']}", str(r["tokens"]), r["route"]]
        line += [f"{1e3 * r['seconds']:.1f}", f"{r['images_per_s']:.1f}"]
        gain = ("{speedup:.2f}x", "{allowed:.2f}x", "{of_allowed:.0%}")
        line += [text.format(**r) if routed else "" for text in gain]
        line += [f"{r['flops_per_s'] / 1e9:.0f}", f"{r['share_of_peak']:.0%}"]
        memory = r["memory_bytes"]
        lines.append([*line, "" if memory is None else f"{memory / 2**30:.2f} GiB"])
    text = table(headers, lines)
    for r in rows:
        if "ours_faster_by" in r:
            text += f"\nours over plain dit, route {r['route']}: {r['ours_faster_by']:.2f}x as fast"
    if any(r["backbone"] == "plain" and r["device"] == "cpu" for r in rows):
        text += "\nplain: in a process of its own, its allocator as torch leaves it"
    return text


def variants_table(rows: Sequence[dict[str, Any]]) -> str:
    """Print rows of `step_times.compare`."""
    lines = [
        [f"{r['backbone']}-{r['size']}", str(r["tokens"]), r["route"], f"{1e3 * r['seconds']:.1f}"]
        + [f"{faster:.2f}x" for faster in r["faster"].values()]
        for r in rows
    ]
    return table(["step", "tokens", "route", "ms", *rows[0]["faster"]], lines)


def profile_table(profiles: dict[str, dict[str, float]]) -> str:
    """Print shares of a step's time: parts down, variants across; then what runs through them."""
    labels = {part: part for part in step_profile.PARTS}
    labels |= {kind: f"in {kind}" for kind in step_profile.WITHIN}
    lines = [
        (label, *(f"{shares[part]:.1%}" for shares in profiles.values()))
        for part, label in labels.items()
    ]
    return table(("share of a step", *profiles), lines)


def blocks_table(rows: Sequence[dict[str, Any]]) -> str:
    """Print one block of every family by tokens, and where each becomes the cheaper one."""
    headers, names = ["block", "tokens"], [k for k, v in rows[0].items() if isinstance(v, dict)]
    for name in names:
        headers += [f"{name} ms/img", f"x {names[0]}", "KiB/token"]
    lines = []
    for r in rows:
        line = [r["size"], str(r["tokens"])]
        for name in names:
            cell = r[name]
            line += [f"{1e3 * cell['seconds_per_image']:.2f}", f"{cell['relative']:.2f}"]
            line.append(f"{cell['kept_bytes_per_token'] / 1024:.1f}")
        lines.append(line)
    text = table(headers, lines)
    for size in dict.fromkeys(r["size"] for r in rows):
        same = [r for r in rows if r["size"] == size]
        for name, tokens in step_profile.crossings(same, names).items():
            where = f"cheaper from {tokens} tokens on" if tokens else "cheaper at none of these"
            text += f"\n{name}-{size} against {names[0]}: {where}"
    return text


def loop_table(rows: Sequence[dict[str, Any]]) -> str:
    """Print what the training loop takes beside forward, backward and optimizer."""
    headers = ["training at scale tiny, route 2-8", "ms/step", "of it the loop", "to first step"]
    lines = []
    for r in rows:
        step, first = f"{1e3 * r['step_s']:.0f}", f"{r['first_step_s']:.1f} s"
        lines.append([r["backbone"], step, f"{r['overhead']:.1%}", first])
    return table(headers, lines)


def profiles(o: BenchOptions, device: torch.device) -> dict[str, dict[str, float]]:
    """Profile the dense and the first routed step of every family."""
    found = {}
    for size, tokens in product(o.size, o.tokens):
        for case in step_times.cases(o, size, tokens):
            if case.backbone != "plain" and case.rate in (0.0, o.rate[0]):
                kind = "routed" if case.route else "dense"
                step = step_times.Step(case, o, device)
                found[f"{case.backbone}-{size}@{tokens} {kind}"] = step_profile.profile(step)
    return found


def run(o: BenchOptions, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure what the options ask for; print it, write it, return it."""
    device = pick_device(o)
    check_replaceable(Path(o.out))  # before what takes minutes
    found: dict[str, Any] = {"options": dataclasses.asdict(o), "environment": environment(device)}
    grids = list(product(o.size, o.tokens))
    # What would end a part in its middle is refused before the first.
    for grid in grids if {*o.parts} & {"steps", "variants", "profile"} else ():
        for case in step_times.cases(o, *grid):
            step_times.check(case, o, device)
    say(_heading(o, found["environment"]))

    def over(measure: Callable[..., list[dict[str, Any]]]) -> list[dict[str, Any]]:
        return [row for grid in grids for row in measure(o, *grid, device)]

    def loop(name: str) -> dict[str, Any]:
        first = step_profile.first_step(name)
        return step_profile.loop_share(name, o.clock) | {"first_step_s": first}

    parts: dict[str, tuple[Callable[[], Any], Callable[[Any], str]]] = {
        "steps": (lambda: over(step_times.measure), steps_table),
        "variants": (lambda: over(step_times.compare), variants_table),
        "profile": (lambda: profiles(o, device), profile_table),
        "blocks": (lambda: step_profile.block_times(o, device), blocks_table),
        "loop": (lambda: [*map(loop, o.backbone)], loop_table),
    }
    for part in filter(o.parts.__contains__, parts):
        measure, show = parts[part]
        found[part] = measure()
        say("\n" + show(found[part]))
        atomic_write(Path(o.out), json.dumps(found, indent=1) + "\n")
    say("\n" + "\n".join(NOTES))
    say(f"figures: {o.out}")
    return found


def _heading(o: BenchOptions, env: dict[str, Any]) -> str:
    extra = f", compile={o.compile}" if o.compile != "none" else ""
    extra += ", CUDA graphs" if o.graphs else ""
    if (env["load_before"] or 0) > 1:
        extra += f"; the machine is busy (load {env['load_before']:.1f}): trust ratios only"
    return (
        f"{env['device_name']}, torch {env['torch']}, {env['threads']} threads, {o.precision}, "
        f"batch {o.batch}, {o.clock} clock, {o.rounds} rounds{extra}"
    )
