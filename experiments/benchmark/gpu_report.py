"""`make gpu`: all tests and measurements that need a GPU, as a page ready to commit.

    python -m experiments.benchmark.gpu_report [out=results/gpu] [size=S/2,B/2,L/2,XL/2] [steps=200]

It runs the tests marked `gpu`, times training steps of the three backbones, dense and routed, at
the paper's sizes (bfloat16, compiled blocks, with and without CUDA graphs) beside a big matmul,
trains a few steps with the main command, and writes OUT/DEVICE.json and OUT/DEVICE.md, again after
each part. Failures are recorded with the end of their output.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge

from backbones.sizes import parse_size
from experiments.benchmark.bench_options import parse
from experiments.runtime.command import run_command
from experiments.runtime.environment import environment
from experiments.runtime.errors import ROOT
from experiments.runtime.files import atomic_write
from routing.errors import UserError


@dataclass(frozen=True)
class ReportOptions:
    """Options of `make gpu`."""

    out: Annotated[str, "Folder of the page."] = "results/gpu"
    size: Annotated[tuple[str, ...], "Sizes whose steps are timed."] = ("S/2", "B/2", "L/2", "XL/2")
    steps: Annotated[int, Ge(1), "Steps of the short training."] = 200
    tests: Annotated[bool, "Run the tests marked gpu."] = True

    def check_consistency(self) -> None:
        """Refuse unknown sizes."""
        for size in self.size:
            parse_size(size)


# Samples of a step up to a width: enough work for an H100, within its memory.
_SAMPLES = ((384, 256), (768, 128), (1024, 64), (10**6, 32))
# Timed variants, and their keys of the benchmark.
_VARIANTS = {
    "compiled blocks": ["compile=blocks"],
    "compiled blocks, CUDA graphs": ["compile=blocks", "graphs=true", "plain=false"],
}
_STEPS = ["experiments/bench.py", "parts=steps", "precision=bf16", "rounds=5", "device=cuda"]
_TRAINING = [
    "experiments/run.py", "route=2-8", "scale=small", "train.precision=bf16",
    "train.compile=blocks", "train.log_every=50", "eval=none",
]  # fmt: skip
BACKBONES = ("dit", "mamba", "rwkv")
LINES = 40  # of each command's output are kept


def devices() -> list[dict[str, Any]]:
    """Return each CUDA device's name, memory in bytes and compute capability."""
    properties = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        capability = f"{device.major}.{device.minor}"
        properties.append(
            {"name": device.name, "memory_bytes": device.total_memory, "capability": capability}
        )
    return properties


def run(title: str, words: Sequence[str]) -> dict[str, Any]:
    """Run a Python command in the repository; return its exit code, seconds and last lines."""
    print(f"{title}: {' '.join(words)} ...", flush=True)
    start = time.perf_counter()
    process = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    output = f"{process.stdout}\n{process.stderr}".strip().splitlines()[-LINES:]
    print("\n".join(output), flush=True)
    return {
        "title": title,
        "words": [*words],
        "rc": process.returncode,
        "seconds": time.perf_counter() - start,
        "output": output,
    }


def time_steps(title: str, words: Sequence[str], size: str, out: Path) -> dict[str, Any]:
    """Time a backbone at one size, with the rows of `out`; halve the batch until it fits."""
    batch = next(samples for width, samples in _SAMPLES if parse_size(size).width <= width)
    while True:
        part = run(title, [*_STEPS, *words, f"size={size}", f"batch={batch}", f"out={out}"])
        if part["rc"] == 0:
            return part | {"rows": json.loads(out.read_text())["steps"]}
        if batch == 1 or "out of memory" not in "\n".join(part["output"]):
            return part
        batch //= 2


def page(report: dict[str, Any]) -> str:
    """Return the Markdown page of a report."""
    env, device = report["environment"], report["devices"][0]
    lines = [
        f"# {device['name']}",
        "",
        f"{device['memory_bytes'] / 2**30:.0f} GiB, compute capability {device['capability']}, "
        f"{len(report['devices'])} in the machine; torch {env['packages']['torch']}, Python "
        f"{env['python']}, commit {env['git'] or 'unknown'}. Written by `make gpu`.",
    ]
    for title, group in itertools.groupby(report["parts"], lambda part: part["title"]):
        lines += ["", f"## {title}"]
        for part in group:
            verdict = "passed" if part["rc"] == 0 else f"failed (exit code {part['rc']})"
            lines += ["", f"`python {' '.join(part['words'])}` {verdict}, {part['seconds']:.0f} s:"]
            lines += ["", "```", *part["output"], "```"]
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    """Run the command; return 0 if everything passed, 1 if something failed."""
    options = parse(argv, ReportOptions)
    gpus = devices()
    if not gpus:
        raise UserError(
            "make gpu: torch sees no CUDA device here; run it on a machine with one, or type "
            "python experiments/bench.py device=cpu"
        )
    out = Path(options.out).absolute()
    parts: list[dict[str, Any]] = []
    report = {"devices": gpus, "environment": environment(), "parts": parts}
    name = re.sub(r"[^a-z0-9]+", "-", gpus[0]["name"].lower()).strip("-")

    def add(part: dict[str, Any]) -> None:
        """Write the parts so far: the time on a GPU may end before the report does."""
        parts.append(part)
        atomic_write(out / f"{name}.json", json.dumps(report, indent=1) + "\n")
        atomic_write(out / f"{name}.md", page(report))

    if options.tests:
        add(run("Tests", ["-m", "pytest", "-q", "-m", "gpu", "--color=no", "tests"]))
    for size, (variant, keys) in itertools.product(options.size, _VARIANTS.items()):
        for backbone in BACKBONES:
            title = f"Training steps, {size}, {variant}"
            arguments = [*keys, f"backbone={backbone}"]
            add(time_steps(title, arguments, size, out / "runs" / "steps.json"))
    for backbone in BACKBONES:
        overrides = [
            f"backbone={backbone}",
            f"train.steps={options.steps}",
            f"paths.runs={out / 'runs'}",
        ]
        add(run("A short training", [*_TRAINING, *overrides]))
    print(f"written: {out / name}.md and .json")
    return int(any(part["rc"] for part in parts))


if __name__ == "__main__":
    sys.exit(run_command(main, computes=True))
