"""`make gpu`: all tests and measurements that need a GPU, as a page ready to commit.

    python -m experiments.benchmark.gpu_report [part=1] [out=results/gpu] [minutes=10]

Three parts (`make gpu-1`, `gpu-2`, `gpu-3`; `make gpu` runs all), each of at most ten minutes:

1. training steps of the three backbones at S/2, dense and routed, with and without CUDA graphs
   (bfloat16, compiled blocks, beside a big matmul), and the tests marked `gpu`
2. the same steps at B/2, L/2 and XL/2, with CUDA graphs
3. a study: pairs of dense and routed runs on scenes, 20,000 steps, with all scores

OUT/DEVICE.json and OUT/DEVICE.md are written before and after each command. The page always covers
all parts, says what has never been run, and shows the end of the output of what failed. A repeated
call at the same commit goes on: it leaves out what has passed (delete the JSON file to measure
again), and the runs of the study resume.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Le

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

    part: Annotated[int, Ge(0), Le(3), "The part to run; 0: all, one after the other."] = 0
    out: Annotated[str, "Folder of the page."] = "results/gpu"
    minutes: Annotated[float, Gt(0), "Most minutes of a part."] = 10.0
    size: Annotated[
        tuple[str, ...], "Sizes whose steps are timed: the first in part 1, the others in part 2."
    ] = ("S/2", "B/2", "L/2", "XL/2")
    steps: Annotated[int, Ge(1), "Steps of each run of the study."] = 20_000
    pairs: Annotated[int, Ge(1), "Pairs of runs in the study, each with its own seed."] = 5
    tests: Annotated[bool, "Run the tests marked gpu."] = True

    def check_consistency(self) -> None:
        """Refuse unknown sizes."""
        for size in self.size:
            parse_size(size)


@dataclass(frozen=True)
class GpuMeasurement:
    """A command of a part; one with a `size` times steps, at the largest batch that fits."""

    title: str
    words: tuple[str, ...]
    size: str = ""


# Samples of a step up to a width: enough work for an H100, within its memory.
_SAMPLES = ((384, 256), (768, 128), (1024, 64), (10**6, 32))
# Timed variants, and their keys of the benchmark.
_GRAPHS = "compiled blocks, CUDA graphs"
_VARIANTS = {
    "compiled blocks": ["compile=blocks"],
    _GRAPHS: ["compile=blocks", "graphs=true", "plain=false"],
}
_STEPS = ["experiments/bench.py", "parts=steps", "precision=bf16", "rounds=5", "device=cuda"]
# The study's model: width 256, 12 blocks, 256 tokens. CUDA graphs are on by default.
_TRAINING = [
    "experiments/run.py", "backbone=dit", "scale=small", "size=M/2", "backbone.width=256",
    "train.precision=bf16", "train.compile=blocks", "train.log_every=50",
]  # fmt: skip
_TIMING_STEPS = 50  # of the runs that time a step before the study
PARTS = {
    1: "Steps at the smallest size, and tests",
    2: "Steps at the larger sizes",
    3: "Dense and routed runs",
}
BACKBONES = ("dit", "mamba", "rwkv")
LINES = 40  # of each command's output are kept
STOP_S = 20.0  # that a command may take to save and end when its time is over


def plan(part: int, options: ReportOptions) -> list[GpuMeasurement]:
    """Return the measurements of a part, in their order."""
    if part == 3:
        return _study(options)
    sizes = options.size[:1] if part == 1 else options.size[1:]
    variants = _VARIANTS if part == 1 else {_GRAPHS: _VARIANTS[_GRAPHS]}
    measurements = []
    for size, (variant, keys) in itertools.product(sizes, variants.items()):
        for backbone in BACKBONES:
            title = f"Training steps, {size}, {variant}"
            words = (*_STEPS, *keys, f"backbone={backbone}", f"size={size}")
            measurements.append(GpuMeasurement(title, words, size))
    if part == 1 and options.tests:
        words = ("-m", "pytest", "-q", "-m", "gpu", "--color=no", "tests")
        measurements.append(GpuMeasurement("Tests", words))
    return measurements


def _study(options: ReportOptions) -> list[GpuMeasurement]:
    routes = ("route=none", "route=2-8")
    runs = f"paths.runs={Path(options.out) / 'runs'}"
    timing = (f"train.steps={_TIMING_STEPS}", "eval=none", runs)
    measurements = [
        GpuMeasurement(f"Time of {_TIMING_STEPS} steps", (*_TRAINING, route, *timing))
        for route in routes
    ]
    for seed, route in itertools.product(range(options.pairs), routes):
        words = (*_TRAINING, route, f"seed={seed}", f"train.steps={options.steps}", runs)
        measurements.append(GpuMeasurement(f"Study, seed {seed}", words))
    return measurements


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


def _end_group(process_id: int, kill: bool) -> None:
    """End a process and those that it started; on Windows, which has no groups, it alone.

    The group also holds processes whose parent has ended: they keep the pipes open.
    """
    number = getattr(signal, "SIGKILL", signal.SIGTERM) if kill else signal.SIGTERM
    end = getattr(os, "killpg", os.kill)
    with contextlib.suppress(ProcessLookupError):
        end(process_id, number)


def run(words: Sequence[str], seconds: float) -> dict[str, Any]:
    """Run a Python command in the repository for at most so many seconds.

    Returns:
        Its exit code, whether it was `stopped` by the limit, its seconds and its last lines.
    """
    print(f"{' '.join(words)} ...", flush=True)
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    stopped = False
    try:
        try:
            texts = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            stopped = True
            process.terminate()  # a training saves its step and ends
            try:
                texts = process.communicate(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                _end_group(process.pid, kill=True)
                texts = process.communicate()
    except BaseException:  # Ctrl-C reaches this process alone
        _end_group(process.pid, kill=False)
        raise
    output = "\n".join(texts).strip().splitlines()[-LINES:]
    print("\n".join(output), flush=True)
    return {
        "rc": process.returncode,
        "stopped": stopped and process.returncode != 0,
        "seconds": time.perf_counter() - start,
        "output": output,
    }


def time_steps(measurement: GpuMeasurement, end: float, out: Path) -> dict[str, Any]:
    """Time steps until `end` (of `time.monotonic`) at most; halve the batch until it fits.

    Returns:
        As `run`, with the `words` that were run and the `rows` of the benchmark's file `out`.
    """
    width = parse_size(measurement.size).width
    batch = next(samples for largest, samples in _SAMPLES if width <= largest)
    while True:
        words = [*measurement.words, f"batch={batch}"]
        result = run([*words, f"out={out}"], max(0.0, end - time.monotonic()))
        result["words"] = words
        if result["rc"] == 0:
            return result | {"rows": json.loads((ROOT / out).read_text())["steps"]}
        if batch == 1 or "out of memory" not in "\n".join(result["output"]):
            return result
        batch //= 2


class GpuReport:
    """The JSON file and the page of one device; what other calls have written is kept.

    Args:
        options: Name the folder and the planned measurements.
        gpus: `devices()`.
    """

    def __init__(self, options: ReportOptions, gpus: list[dict[str, Any]]) -> None:
        self.options, self.gpus = options, gpus
        name = re.sub(r"[^a-z0-9]+", "-", gpus[0]["name"].lower()).strip("-")
        self.folder = ROOT / options.out
        self.json_path, self.page_path = self.folder / f"{name}.json", self.folder / f"{name}.md"
        # For each part, the environment of its last call and a record by measurement.
        self.parts: dict[str, Any] = {}
        if self.json_path.exists():
            self.parts = json.loads(self.json_path.read_text()).get("calls", {})

    def start(self, part: int) -> dict[str, Any]:
        """Return the records of a part to add to: what has passed at this commit."""
        env = environment()
        previous = self.parts.get(str(part), {"environment": {"git": None}, "records": {}})
        records = {}
        if env["git"] is not None and env["git"] == previous["environment"]["git"]:
            for command, record in previous["records"].items():
                if record["rc"] == 0:
                    records[command] = record
        self.parts[str(part)] = {"environment": env, "records": records}
        return records

    def write(self) -> None:
        """Write both files."""
        values = {"devices": self.gpus, "calls": self.parts}
        atomic_write(self.json_path, json.dumps(values, indent=1) + "\n")
        atomic_write(self.page_path, self.page())

    def page(self) -> str:
        """Return the page: what has never been run, then each part."""
        device = self.gpus[0]
        lines = [
            f"# {device['name']}",
            "",
            f"{device['memory_bytes'] / 2**30:.0f} GiB, compute capability "
            f"{device['capability']}, {len(self.gpus)} in the machine. Written by `make gpu`.",
            "",
            "## Never run to the end",
            "",
        ]
        sections = []
        for part in PARTS:
            records = self.parts.get(str(part), {"records": {}})["records"]
            for measurement in plan(part, self.options):
                record = records.get(" ".join(measurement.words))
                if record is None or record["rc"] is None or record["stopped"]:
                    command = " ".join(measurement.words)
                    lines.append(f"- {measurement.title} (`make gpu-{part}`): `python {command}`")
            sections += self._section(part)
        if len(self.gpus) < 2:
            lines.append("- CUDA graphs with several processes: the tests need two GPUs")
        return "\n".join([*lines, *sections]) + "\n"

    def _section(self, part: int) -> list[str]:
        if str(part) not in self.parts:
            return []
        env, records = self.parts[str(part)]["environment"], self.parts[str(part)]["records"]
        lines = ["", f"## {PARTS[part]}", ""]
        lines.append(
            f"`make gpu-{part}`: torch {env['packages']['torch']}, Python {env['python']}, commit "
            f"{env['git'] or 'unknown'}."
        )
        for title in dict.fromkeys(record["title"] for record in records.values()):
            lines += ["", f"### {title}"]
            for record in records.values():
                if record["title"] != title:
                    continue
                lines += ["", f"`python {' '.join(record['words'])}` {_verdict(record)}"]
                if record["output"]:
                    lines[-1] += ":"
                    lines += ["", "```", *record["output"], "```"]
        return lines


def _verdict(record: dict[str, Any]) -> str:
    if record["rc"] is None:
        return "was interrupted"
    if record["stopped"]:
        return f"was stopped by the time limit after {record['seconds']:.0f} s"
    verdict = "passed" if record["rc"] == 0 else f"failed (exit code {record['rc']})"
    return f"{verdict}, {record['seconds']:.0f} s"


def run_part(part: int, report: GpuReport) -> bool:
    """Run what is left of a part, as far as its time allows; return whether all of it passed."""
    options = report.options
    end = time.monotonic() + 60 * options.minutes - STOP_S
    records = report.start(part)
    report.write()
    for measurement in plan(part, options):
        command = " ".join(measurement.words)
        if command in records:
            print(f"passed before: python {command}", flush=True)
            continue
        if time.monotonic() >= end:
            break
        record = {
            "title": measurement.title, "words": [*measurement.words],
            "rc": None, "stopped": False, "seconds": 0.0, "output": [],
        }  # fmt: skip
        # On disk before it begins: the time on a GPU may end without a signal.
        records[command] = record
        report.write()
        if measurement.size:
            rows_path = Path(options.out) / "runs" / "steps.json"
            records[command] = record | time_steps(measurement, end, rows_path)
        else:
            records[command] = record | run(measurement.words, end - time.monotonic())
        report.write()
    return len(records) == len(plan(part, options)) and all(
        record["rc"] == 0 for record in records.values()
    )


def main(argv: list[str]) -> int:
    """Run the command; return 0 if everything passed, 1 if something failed or was not reached."""
    options = parse(argv, ReportOptions)
    gpus = devices()
    if not gpus:
        raise UserError(
            "make gpu: torch sees no CUDA device here; run it on a machine with one, or type "
            "python experiments/bench.py device=cpu"
        )
    report = GpuReport(options, gpus)
    passed = [run_part(part, report) for part in ([options.part] if options.part else PARTS)]
    print(f"written: {report.page_path} and .json")
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(run_command(main, computes=True))
