"""`make gpu`: everything that wants a GPU, in one command, as a page ready to commit.

    python -m experiments.benchmark.gpu_report [out=results/gpu] [size=S/2,B/2,L/2,XL/2] [steps=200]

It runs the tests marked `gpu`, times training steps of the three backbones, dense and routed, at
the paper's sizes (bfloat16, compiled blocks, with and without CUDA graphs) beside a big matmul,
trains for a moment through the main command, and writes OUT/DEVICE.json and OUT/DEVICE.md, again
after each part. What fails is written down as failed.
"""

from __future__ import annotations

import gc
import itertools
import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch

from backbones.sizes import parse_size
from experiments.benchmark import step_times
from experiments.benchmark.bench_options import BenchError, BenchOptions, parse
from experiments.benchmark.bench_report import steps_table
from experiments.runtime.command import ROOT, run_command
from experiments.runtime.files import atomic_write
from experiments.runtime.option_types import Key, check_ranges
from experiments.training.session import environment
from routing.errors import UserError


@dataclass(frozen=True)
class ReportOptions:
    """What to measure, as in the module's first line of use; `tests`: run those marked `gpu`."""

    out: str = "results/gpu"
    size: tuple[str, ...] = ("S/2", "B/2", "L/2", "XL/2")
    steps: Annotated[int, Key(least=1)] = 200
    tests: bool = True

    def __post_init__(self) -> None:
        check_ranges(self, error=BenchError)
        for size in self.size:
            parse_size(size)


# Samples of a step by width: enough work for an H100, and no more than its memory.
_SAMPLES = ((384, 256), (768, 128), (1024, 64), (10**6, 32))
# What is timed: name, and the benchmark's keys.
_VARIANTS = {
    "compiled blocks": ["compile=blocks"],
    "compiled blocks, CUDA graphs": ["compile=blocks", "graphs=true", "plain=false"],
}
_TRAINING = [
    "route=2-8", "scale=small", "train.precision=bf16", "train.compile=blocks",
    "train.log_every=50", "eval=none",
]  # fmt: skip
BACKBONES = ("dit", "mamba", "rwkv")


def devices() -> list[dict[str, Any]]:
    """Return each CUDA device's name, memory in bytes and compute capability."""
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        {"name": p.name, "memory_bytes": p.total_memory, "capability": f"{p.major}.{p.minor}"}
        for p in found
    ]


def run_tests() -> dict[str, Any]:
    """Run the tests marked `gpu`; return the exit code, pytest's last line and the seconds."""
    began = time.perf_counter()
    words = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--color=no", "tests"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    lines = [*done.stdout.strip().splitlines(), *done.stderr.strip().splitlines()] or ["no output"]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    last = next((line for line in reversed(lines) if re.search(r"\d+ \w+ in ", line)), lines[-1])
    return {"rc": done.returncode, "last": last.strip("= "), "failed": failed, "seconds": seconds}


def time_steps(size: str, backbone: str, words: list[str], device: torch.device) -> dict[str, Any]:
    """Time a backbone at one size; halve the batch until it fits.

    One backbone at a time: all steps that are compared are in memory at once, and one that fails
    leaves the others their rows. Return rows, or what was in the way.
    """
    batch = next(samples for width, samples in _SAMPLES if parse_size(size).width <= width)
    keys = [f"size={size}", f"backbone={backbone}", "precision=bf16", "rounds=5", *words]
    while True:
        o = parse([*keys, f"batch={batch}"], BenchOptions)
        try:
            return {"batch": batch, "rows": step_times.measure(o, size, o.tokens[0], device)}
        except torch.cuda.OutOfMemoryError:
            if batch == 1:
                return {"error": "out of memory with one sample"}
            batch //= 2
        except Exception as error:  # the page says what failed; the other sizes are timed
            first = (str(error).splitlines() or ["no message"])[0]
            return {"error": f"{type(error).__name__}: {first[:200]}"}
        finally:
            # A trainer and its recorded steps point at each other.
            gc.collect()
            torch.cuda.empty_cache()


def train(backbone: str, steps: int, runs: Path) -> dict[str, Any]:
    """Train through the main command at scale small; return its last metrics."""
    words = [f"backbone={backbone}", f"train.steps={steps}", *_TRAINING]
    command = [sys.executable, "experiments/run.py", *words, f"paths.runs={runs}"]
    began = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found: dict[str, Any] = {"words": words, "rc": done.returncode}
    found["seconds"] = time.perf_counter() - began
    if done.returncode:
        found["error"] = (done.stderr.strip().splitlines() or ["no message"])[-1][:200]
        return found
    folder = max(runs.glob(f"{backbone}-*"), key=lambda path: path.stat().st_mtime)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return found | {"last": json.loads(lines[-1])}


def page(found: dict[str, Any]) -> str:
    """Return the Markdown page of what was found."""
    env, own = found["environment"], found["devices"][0]
    commit = env["git"] or "unknown"
    lines = [
        f"# {own['name']}",
        "",
        f"{own['memory_bytes'] / 2**30:.0f} GiB, compute capability {own['capability']}, "
        f"{len(found['devices'])} in the machine; torch {env['packages']['torch']}, Python "
        f"{env['python']}, commit {commit}. Written by `make gpu`.",
        "",
        "## Tests",
        "",
    ]
    tests = found["tests"]
    if tests is None:
        lines.append("Not run (tests=false).")
    else:
        verdict = "passed" if tests["rc"] == 0 else f"failed (exit code {tests['rc']})"
        lines.append(f"`pytest -m gpu` {verdict}: {tests['last']}.")
        lines += [f"- `{line}`" for line in tests["failed"]]
    lines += ["", "## Training steps", ""]
    lines.append(
        "bfloat16, 256 tokens, the guideline's route, medians of 5 interleaved rounds; of peak: "
        "the share of a big matmul's FLOP/s in the same rounds."
    )
    for title, group in itertools.groupby(
        found["steps"], lambda entry: f"{entry['size']}, {entry['variant']}"
    ):
        lines += ["", f"### {title}", ""]
        entries = list(group)
        if timed := [entry for entry in entries if "rows" in entry]:
            batches = ", ".join(f"{e['backbone']} {e['batch']}" for e in timed)
            table = steps_table([row for entry in timed for row in entry["rows"]])
            lines += [f"Batch: {batches}.", "", "```", table, "```"]
        lines += [f"{e['backbone']} failed: {e['error']}." for e in entries if "error" in e]
    lines += ["", "## A short training", ""]
    for entry in found["training"]:
        words = " ".join(entry["words"])
        if "error" in entry:
            lines.append(f"- `{words}`: failed, {entry['error']}")
        else:
            last = entry["last"]
            lines.append(
                f"- `{words}`: loss {last['loss']:.4f} at step {last['step']}, "
                f"{last['images_per_s']:.0f} images/s, {entry['seconds']:.0f} s in all"
            )
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
    device, out = torch.device("cuda" if torch.cuda.is_available() else "cpu"), Path(asked.out)
    found: dict[str, Any] = {"devices": listed, "environment": environment()}
    found |= {"tests": None, "training": [], "steps": []}
    name = re.sub(r"[^a-z0-9]+", "-", listed[0]["name"].lower()).strip("-")

    def write() -> None:
        """Write what there is so far: an hour of a GPU may end before the page does."""
        atomic_write(out / f"{name}.json", json.dumps(found, indent=1) + "\n")
        atomic_write(out / f"{name}.md", page(found))

    if asked.tests:
        print("tests marked gpu ...", flush=True)
        found["tests"] = run_tests()
        print(found["tests"]["last"], flush=True)
        write()
    for size, (variant, keys) in itertools.product(asked.size, _VARIANTS.items()):
        for backbone in BACKBONES:
            print(f"{size}, {variant}, {backbone} ...", flush=True)
            entry = time_steps(size, backbone, keys, device)
            print(entry.get("error") or steps_table(entry["rows"]), flush=True)
            about = {"size": size, "variant": variant, "backbone": backbone}
            found["steps"].append(about | entry)
            write()
    for backbone in BACKBONES:
        print(f"training {backbone} for {asked.steps} steps ...", flush=True)
        found["training"].append(train(backbone, asked.steps, out / "runs"))
        write()
    print(f"written: {out / name}.md and .json")
    failed = [e for e in (*found["steps"], *found["training"]) if "error" in e]
    return 1 if failed or (found["tests"] or {}).get("rc") else 0


if __name__ == "__main__":
    sys.exit(run_command(main, computes=True))
