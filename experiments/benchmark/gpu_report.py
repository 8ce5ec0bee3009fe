"""`make gpu`: everything that wants a GPU, in one command, as a page ready to commit.

    python -m experiments.benchmark.gpu_report [out=results/gpu] [size=S/2,B/2,L/2,XL/2] [steps=200]

It runs the tests marked `gpu`, times training steps of the three backbones, dense and routed, at
the paper's sizes (bfloat16, compiled blocks, with and without CUDA graphs) beside a big matmul,
trains for a moment through the main command, and writes OUT/DEVICE.json and OUT/DEVICE.md, again
after each part. What fails is written down as failed, with the end of what it said.
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

from backbones.sizes import parse_size
from experiments.benchmark.bench_options import parse
from experiments.options.fields import Key
from experiments.runtime.command import ROOT, run_command
from experiments.runtime.environment import environment
from experiments.runtime.files import atomic_write
from routing.errors import UserError


@dataclass(frozen=True)
class ReportOptions:
    """What to measure, as in the module's first line of use; `tests`: run those marked `gpu`."""

    out: str = "results/gpu"
    size: tuple[str, ...] = ("S/2", "B/2", "L/2", "XL/2")
    steps: Annotated[int, Key(least=1)] = 200
    tests: bool = True

    def __post_init__(self) -> None:
        for size in self.size:
            parse_size(size)


# Samples of a step by width: enough work for an H100, and no more than its memory.
_SAMPLES = ((384, 256), (768, 128), (1024, 64), (10**6, 32))
# What is timed: name, and the benchmark's keys.
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
LINES = 40  # of each command's output


def devices() -> list[dict[str, Any]]:
    """Return each CUDA device's name, memory in bytes and compute capability."""
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        {"name": p.name, "memory_bytes": p.total_memory, "capability": f"{p.major}.{p.minor}"}
        for p in found
    ]


def run(title: str, words: Sequence[str]) -> dict[str, Any]:
    """Run a Python command in the repository; return its exit code, seconds and last lines."""
    print(f"{title}: {' '.join(words)} ...", flush=True)
    began = time.perf_counter()
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    output = f"{done.stdout}\n{done.stderr}".strip().splitlines()[-LINES:]
    print("\n".join(output), flush=True)
    found: dict[str, Any] = {"title": title, "words": [*words], "rc": done.returncode}
    return found | {"seconds": time.perf_counter() - began, "output": output}


def time_steps(title: str, words: Sequence[str], size: str, out: Path) -> dict[str, Any]:
    """Time a backbone at one size, with the rows of `out`; halve the batch until it fits."""
    batch = next(samples for width, samples in _SAMPLES if parse_size(size).width <= width)
    while True:
        found = run(title, [*_STEPS, *words, f"size={size}", f"batch={batch}", f"out={out}"])
        if found["rc"] == 0:
            return found | {"rows": json.loads(out.read_text())["steps"]}
        if batch == 1 or not any("out of memory" in line for line in found["output"]):
            return found
        batch //= 2


def page(found: dict[str, Any]) -> str:
    """Return the Markdown page of what was found."""
    env, own = found["environment"], found["devices"][0]
    lines = [
        f"# {own['name']}",
        "",
        f"{own['memory_bytes'] / 2**30:.0f} GiB, compute capability {own['capability']}, "
        f"{len(found['devices'])} in the machine; torch {env['packages']['torch']}, Python "
        f"{env['python']}, commit {env['git'] or 'unknown'}. Written by `make gpu`.",
    ]
    for title, group in itertools.groupby(found["parts"], lambda part: part["title"]):
        lines += ["", f"## {title}"]
        for part in group:
            verdict = "passed" if part["rc"] == 0 else f"failed (exit code {part['rc']})"
            lines += ["", f"`python {' '.join(part['words'])}` {verdict}, {part['seconds']:.0f} s:"]
            lines += ["", "```", *part["output"], "```"]
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    """Run the command; return 0 if everything passed, 1 if something failed."""
    asked = parse(argv, ReportOptions)
    listed = devices()
    if not listed:
        raise UserError(
            "make gpu: torch sees no CUDA device here; run it on a machine with one, or type "
            "python experiments/bench.py device=cpu"
        )
    out, parts = Path(asked.out).absolute(), list[dict[str, Any]]()
    found = {"devices": listed, "environment": environment(), "parts": parts}
    name = re.sub(r"[^a-z0-9]+", "-", listed[0]["name"].lower()).strip("-")

    def note(part: dict[str, Any]) -> None:
        """Write what there is so far: an hour of a GPU may end before the page does."""
        parts.append(part)
        atomic_write(out / f"{name}.json", json.dumps(found, indent=1) + "\n")
        atomic_write(out / f"{name}.md", page(found))

    if asked.tests:
        note(run("Tests", ["-m", "pytest", "-q", "-m", "gpu", "--color=no", "tests"]))
    for size, (variant, keys) in itertools.product(asked.size, _VARIANTS.items()):
        for backbone in BACKBONES:
            words = [*keys, f"backbone={backbone}"]
            title = f"Training steps, {size}, {variant}"
            note(time_steps(title, words, size, out / "runs" / "steps.json"))
    for backbone in BACKBONES:
        words = [f"backbone={backbone}", f"train.steps={asked.steps}", f"paths.runs={out / 'runs'}"]
        note(run("A short training", [*_TRAINING, *words]))
    print(f"written: {out / name}.md and .json")
    return int(any(part["rc"] for part in parts))


if __name__ == "__main__":
    sys.exit(run_command(main, computes=True))
