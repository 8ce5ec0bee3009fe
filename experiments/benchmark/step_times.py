"""Training steps timed in turn: the real `Trainer` on random latents, and a plain DiT.

Variants run in turn in one process, so that a busy machine slows all of them. The report is the
median over rounds of ratios within a round.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from timeit import repeat, timeit
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backbones.cost import Cost, cost
from backbones.ops.dispatch import without_native
from backbones.sizes import parse_size
from experiments.benchmark.bench_options import BenchOptions
from experiments.benchmark.plain_dit import PlainStep
from experiments.benchmark.random_latents import RandomLatents, open_gates
from experiments.config.schema import Config
from experiments.training.build import build_step
from experiments.training.cuda_graphs import EAGER
from routing.route import Route


@dataclass(frozen=True)
class Case:
    """One variant of a step."""

    backbone: str  # family, or `plain` for the comparison
    size: str  # size with patch
    tokens: int  # grid tokens
    route: Route  # the route, `none` for the dense step
    rate: float  # share that skips inside the route

    @property
    def side(self) -> int:
        """Side of the latents."""
        return math.isqrt(self.tokens) * parse_size(self.size).patch

    def names(self, depth: int | None) -> dict[str, Any]:
        """Return the columns that identify this variant in a row of results."""
        route = self.route.resolve(parse_size(self.size, depth).depth)
        return {
            "backbone": self.backbone,
            "size": self.size,
            "tokens": self.tokens,
            "route": str(route),
        }

    def cost(self, depth: int | None) -> Cost:
        """Count this step's forward pass."""
        family = "dit" if self.backbone == "plain" else self.backbone
        return cost(family, self.size, route=self.route, input_size=self.side, depth=depth)


def cases(o: BenchOptions, size: str, tokens: int) -> list[Case]:
    """Return the variants that are compared, each dense one before its routed ones."""
    route = Route.parse(o.route)
    names = list(o.backbone)
    if o.plain and "dit" in names:
        names.append("plain")
    variants = []
    for name in names:
        variants.append(Case(name, size, tokens, Route(()), 0.0))
        if route:
            for rate in o.rate[:1] if name == "plain" else o.rate:
                variants.append(Case(name, size, tokens, route.with_rate(rate), rate))
    return variants


# --- one step ------------------------------------------------------------------------------------


class Step:
    """One variant of the real training step, ready to run: call it for one step."""

    def __init__(self, case: Case, o: BenchOptions, device: torch.device) -> None:
        train = {
            "batch": o.batch, "clip": 1.0, "precision": o.precision, "compile": o.compile,
            "graphs": o.graphs,
        }  # fmt: skip
        config = Config.from_dict({
            "size": case.size, "route": str(case.route), "train": train,
            "routing": {"selection": o.selection, "fp32_after": o.fp32_after},
            "backbone": {"name": case.backbone, "depth": o.depth}, "data": {"name": "latents"},
            "objective": {"name": "flow"}, "sampler": {"name": "euler"},
            "guidance": {"name": "none"}, "eval": {"name": "none"},
        })  # fmt: skip
        data = RandomLatents(case.side, o.batch, device)
        # The attributes of an `accelerate.Accelerator` that a step uses.
        accelerator = SimpleNamespace(device=device, num_processes=1, process_index=0)
        self.training_step = build_step(config, accelerator, data)
        self.model, self.state = self.training_step.model, self.training_step.state
        self.params, self.ema = self.state.params, self.state.ema
        open_gates(self.model)

    def loss(self) -> Tensor:
        """Sample noise and times, and run the forward pass."""
        return self.training_step.loss(next(self.training_step.micro_batches()))

    def __call__(self) -> None:
        """Take one step."""
        self.training_step.run()
        self.state.step += 1


def make_step(case: Case, o: BenchOptions, device: torch.device) -> Step | PlainStep:
    """Return a variant's step: ours, or that of the plain reimplementation."""
    if case.backbone == "plain":
        route = case.route.resolve(parse_size(case.size, o.depth).depth)
        return PlainStep(case.size, case.side, route, o, device)
    return Step(case, o, device)


# --- timing --------------------------------------------------------------------------------------


def peak(device: torch.device, precision: str) -> tuple[Callable[[], Any], int]:
    """Return a big matmul and its FLOPs, as the peak performance of this device."""
    side = 8192 if device.type == "cuda" else 1024
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out), 2 * side**3


def ratio(a: Any, b: Any) -> float:
    """Median over rounds of one variant's seconds, or FLOP/s, over another's in the same round."""
    return float(np.median(a / b))


def interleave(
    runs: Sequence[Callable[[], Any]], o: BenchOptions, device: torch.device
) -> tuple[Any, Any]:
    """Time all variants in turn, every round in another order, with a matmul in between.

    Returns:
        The seconds as an array (variants, rounds), and the matmul's FLOP/s (rounds,) beside them.
    """
    warm = EAGER + 1 if o.graphs else 2  # a step is recorded after that many

    def wall() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    timer = time.process_time if o.clock == "cpu" else wall
    matmul, flops = peak(device, o.precision)
    for run in (*runs, matmul):
        for _ in range(warm):
            run()
    seconds, peaks = np.empty((len(runs), o.rounds)), np.empty(o.rounds)
    for number in range(o.rounds):
        for offset in range(len(runs)):
            i = (number + offset) % len(runs)
            seconds[i, number] = timeit(runs[i], timer=timer, number=1)
        peaks[number] = flops / min(repeat(matmul, timer=timer, number=1))
    return seconds, peaks


def kept_bytes(run: Callable[[], Any], model: torch.nn.Module) -> int:
    """Return the bytes that a forward pass keeps for its backward pass, without parameters."""
    parameter_storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes: dict[int, int] = {}

    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameter_storages:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        # The result keeps the graph, hence every storage, alive until it is counted.
        result = run()
    del result
    return sum(sizes.values())


def step_memory(step: Step | PlainStep, device: torch.device) -> int:
    """Peak bytes of a training step: measured on CUDA, else counted (kept and states)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    states = sum(p.numel() * p.element_size() for p in step.params) * 5
    return states + kept_bytes(step.loss, step.model)


def measure(o: BenchOptions, size: str, tokens: int, device: torch.device) -> list[dict[str, Any]]:
    """Time the variants of one size and number of tokens; return one row each."""
    variants = cases(o, size, tokens)
    steps = [make_step(case, o, device) for case in variants]
    seconds, peaks = interleave(steps, o, device)
    # Variants that a row is compared with: its dense step, and our DiT on the same route.
    seconds_by_variant = {}
    for case, case_seconds in zip(variants, seconds, strict=True):
        seconds_by_variant[case.backbone, str(case.route)] = case_seconds
    rows = []
    for case, step, case_seconds in zip(variants, steps, seconds, strict=True):
        row = _step_row(case, o, case_seconds, peaks)
        row["device"] = device.type
        row["kernels"] = [] if isinstance(step, PlainStep) else step.model.describe()
        # A replayed graph allocates nothing: its memory was allocated during the recording.
        row["memory_bytes"] = None if o.graphs else step_memory(step, device)
        row["memory_measured"] = device.type == "cuda" and not o.graphs
        if case.route:
            dense_seconds = seconds_by_variant[case.backbone, "none"]
            row["speedup"] = ratio(dense_seconds, case_seconds)
            row["allowed"] = case.cost(o.depth).speedup
            row["of_allowed"] = row["speedup"] / row["allowed"]
        if case.backbone == "plain":
            our_seconds = seconds_by_variant["dit", str(case.route)]
            row["ours_faster_by"] = ratio(case_seconds, our_seconds)
        rows.append(row)
    rows[0]["matmul_flops_per_s"] = float(peaks.max())
    return rows


def _step_row(case: Case, o: BenchOptions, seconds: Any, peaks: Any) -> dict[str, Any]:
    """Return the results of one variant by itself, from its seconds (rounds,)."""
    macs = case.cost(o.depth).macs_routed
    # Forward and twice as much backward; 2 FLOPs per MAC.
    flops = 2 * 3 * macs * o.batch
    median = float(np.median(seconds))
    return {
        **case.names(o.depth),
        "rate": case.rate,
        "seconds": median,
        "images_per_s": o.batch / median,
        "flops_per_s": flops / median,
        "share_of_peak": ratio(flops / seconds, peaks),
        "macs_per_image": macs,
        "rounds": seconds.tolist(),
    }


# Comparisons with the plain reimplementation: our variant and its, by their names in `compare`.
OVER_PLAIN = {
    "eager": ("ours", "plain"),
    "eager, theirs compiled": ("ours", "plain+compiled"),
    "both compiled": ("compiled", "plain+compiled"),
}


def _over_plain(seconds_by_variant: dict[str, Any]) -> dict[str, float]:
    """Return how many times as fast as the plain reimplementation our step is, where both ran."""
    ratios = {}
    for name, (ours, theirs) in OVER_PLAIN.items():
        if ours in seconds_by_variant and theirs in seconds_by_variant:
            ratios[name] = ratio(seconds_by_variant[theirs], seconds_by_variant[ours])
    return ratios


def compare(o: BenchOptions, size: str, tokens: int, device: torch.device) -> list[dict[str, Any]]:
    """Time steps against their `o.variants`; return a row for each step.

    `faster` has by variant how many times as fast as the step itself it is, `over_plain` how many
    times as fast as the plain reimplementation ours is, by `OVER_PLAIN`.
    """
    rows = []
    for case in cases(dataclasses.replace(o, plain=False, rate=o.rate[:1]), size, tokens):
        first = Step(case, o, device)
        runs: list[Callable[[], Any]] = [first]
        variants = [name for name in o.variants if case.backbone == "dit" or "plain" not in name]
        for name in variants:
            changes = name.split("+")
            options = dataclasses.replace(
                o,
                precision="bf16" if "bf16" in changes else o.precision,
                compile="blocks" if "compiled" in changes else o.compile,
            )
            is_plain = "plain" in changes
            timed_case = dataclasses.replace(case, backbone="plain") if is_plain else case
            step = make_step(timed_case, options, device)
            runs.append(without_native()(step) if "torch" in changes else step)
        seconds, _ = interleave(runs, o, device)
        seconds_by_variant = dict(zip(["ours", *variants], seconds, strict=True))
        faster = {name: ratio(seconds[0], seconds_by_variant[name]) for name in variants}
        rows.append(
            {
                **case.names(o.depth),
                "seconds": float(np.median(seconds[0])),
                "kernels": first.model.describe(),
                "faster": faster,
                "over_plain": _over_plain(seconds_by_variant),
                "rounds": seconds.tolist(),
            }
        )
    return rows
