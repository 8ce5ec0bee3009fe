"""Training steps to be timed: those of `experiments.training.loop`, on random latents, no files.

A step draws noise, times and subsets, runs the model forward and back, clips, and updates weights
and EMA. Variants run in turn in one process, so that a busy machine slows all alike; what is
reported is the median over rounds of ratios within a round.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import backbones
from backbones.cost import Cost, cost
from backbones.sizes import parse_size
from experiments.benchmark.bench_options import BenchError, BenchOptions
from experiments.benchmark.plain_dit import PlainDiT, PlainUpdate
from experiments.diffusion import create_objective
from experiments.runtime.memory import check_fits
from experiments.training.build import compile_blocks
from routing.rng import Draws
from routing.route import Route
from routing.selection import Selection
from routing.stack import Routing

CLASSES = 1000
LABEL_DROP = 0.1


@dataclass(frozen=True)
class Case:
    """One variant of a step.

    Attributes:
        backbone: Family, or `plain` for the comparison.
        size: Size with patch.
        tokens: Grid tokens.
        route: The route, `none` for the dense step.
        rate: Share that skips inside the route.
    """

    backbone: str
    size: str
    tokens: int
    route: Route
    rate: float

    @property
    def family(self) -> str:
        """The family whose cost this is."""
        return "dit" if self.backbone == "plain" else self.backbone

    def cost(self, depth: int | None) -> Cost:
        """Count this step's forward pass."""
        side = math.isqrt(self.tokens) * parse_size(self.size).patch
        return cost(self.family, self.size, route=self.route, input_size=side, depth=depth)


def cases(o: BenchOptions, size: str, tokens: int) -> list[Case]:
    """Return the variants that are compared with each other, every dense one before its routed."""
    route = Route.parse(o.route)
    names = [*o.backbone, *(["plain"] if o.plain and "dit" in o.backbone else [])]
    found = []
    for name in names:
        found.append(Case(name, size, tokens, Route(()), 0.0))
        if route:
            routed = [Case(name, size, tokens, route.with_rate(rate), rate) for rate in o.rate]
            found += routed[:1] if name == "plain" else routed
    return found


class Update:
    """Fused AdamW and one foreach EMA, as the training loop has them."""

    def __init__(self, model: torch.nn.Module, capturable: bool) -> None:
        self.params: list[Tensor] = list(model.parameters())
        self.ema = [p.detach().clone() for p in self.params]
        options: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.0, "fused": True}
        self.optimizer = torch.optim.AdamW(self.params, capturable=capturable, **options)

    def step(self) -> None:
        """Apply the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def average(self) -> None:
        """Move the average towards the weights."""
        torch._foreach_lerp_(self.ema, self.params, 1e-4)


class Step:
    """One variant, ready to run: call it for one training step.

    Args:
        case: What.
        o: How.
        device: Where.
    """

    def __init__(self, case: Case, o: BenchOptions, device: torch.device) -> None:
        self.case, self.o, self.device = case, o, device
        at_once = 0 if device.type == "cuda" else o.batch
        check_fits(case.cost(o.depth), at_once, "a smaller size=, depth=, tokens= or batch=")
        shape = parse_size(case.size, o.depth)
        self.route = case.route.resolve(shape.depth)
        side = math.isqrt(case.tokens) * shape.patch
        torch.manual_seed(0)
        if case.backbone == "plain":
            segment = self.route.segments[0] if self.route else None
            span = (segment.start, segment.end, segment.rate) if segment else None
            size = (shape.depth, shape.width, shape.heads, shape.patch, side)
            self.model: Any = PlainDiT(*size, classes=CLASSES, route=span).to(device)
            self.update: Any = PlainUpdate(self.model)
        else:
            name, classes = case.backbone, CLASSES
            self.model = backbones.create(
                name, case.size, depth=o.depth, input_size=side, num_classes=classes
            ).to(device)
            self.model.stack.fp32_after = o.fp32_after
            self.update = Update(self.model, o.graphs)
            if o.compile == "blocks":
                compile_blocks(self.model)
        _open_gates(self.model)
        self.objective = create_objective("flow")
        self.selection, self.count = Selection(o.selection), 0
        rows = torch.randn(o.batch, 4, side, side, generator=torch.Generator().manual_seed(1))
        self.latents = rows.to(device)
        self.labels = torch.arange(o.batch, device=device) % CLASSES
        self.rows = torch.arange(o.batch, device=device)

    def loss(self) -> Tensor:
        """Draw and run the forward pass."""
        draws = Draws(0, self.count, self.rows, device=self.device)
        routing = Routing(self.route, self.selection, draws) if self.route else None
        time = self.objective.times(draws)
        noise = draws.normal("noise", tuple(self.latents.shape[1:]))
        drop = draws.uniform("drop", 1)[:, 0] < LABEL_DROP
        y = torch.where(drop, CLASSES, self.labels)
        half = self.o.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=half):
            terms = self.objective.loss(self.model, self.latents, noise, time, y=y, routing=routing)
        return terms.float().mean()

    def __call__(self) -> None:
        """Take one step."""
        with named("forward"):
            loss = self.loss()
        with named("backward"):
            loss.backward()
        with named("clip"):
            torch.nn.utils.clip_grad_norm_(self.update.params, 1.0)
        with named("optimizer"):
            self.update.step()
        with named("EMA"):
            self.update.average()
        self.count += 1


@contextmanager
def named(part: str) -> Iterator[None]:
    """Name what runs inside for the profiler."""
    with torch.profiler.record_function(f"part:{part}"):
        yield


@torch.no_grad()
def _open_gates(model: torch.nn.Module) -> None:
    """Leave the zeros of adaLN-zero behind: multiplying by zero is no fair arithmetic."""
    generator = torch.Generator().manual_seed(2)
    for p in model.parameters():
        if p.requires_grad and not bool(p.any()):
            noise = torch.randn(p.shape, generator=generator) * 0.02
            p.copy_(noise.to(p.device))


class Clock:
    """Seconds of a call on a device.

    Args:
        device: Where it runs; a CUDA device is waited for.
        kind: `wall`, or `cpu` for the process's own time.
    """

    def __init__(self, device: torch.device, kind: str) -> None:
        self.cuda = device.type == "cuda"
        if kind == "cpu" and self.cuda:
            raise BenchError("clock=cpu cannot see a GPU's work: type clock=wall")
        self.now = time.process_time if kind == "cpu" else time.perf_counter

    def __call__(self, run: Callable[[], Any]) -> float:
        """Run once and return the seconds; what ran elsewhere returns its own."""
        self._wait()
        began = self.now()
        elsewhere = run()
        self._wait()
        return elsewhere if isinstance(elsewhere, float) else self.now() - began

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


def peak(device: torch.device, precision: str) -> tuple[Callable[[], Any], int]:
    """Return a big matmul and its FLOPs: what this device can do at best."""
    side = 8192 if device.type == "cuda" else 1024
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out), 2 * side**3


@dataclass
class Timed:
    """Seconds of each variant in each round, and the FLOP/s of the matmul beside them."""

    seconds: list[list[float]] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)

    def median(self, i: int) -> float:
        """Median seconds of variant i."""
        return statistics.median(self.seconds[i])

    def ratio(self, i: int, j: int) -> float:
        """Median over rounds of the time of variant i over that of variant j."""
        pairs = zip(self.seconds[i], self.seconds[j], strict=True)
        return statistics.median(a / b for a, b in pairs)

    def share_of_peak(self, i: int, flops: float) -> float:
        """Median over rounds of a variant's FLOP/s over the matmul's in that round."""
        pairs = zip(self.seconds[i], self.peaks, strict=True)
        return statistics.median(flops / s / p for s, p in pairs)


def interleave(
    runs: Sequence[Callable[[], Any]], o: BenchOptions, device: torch.device, warm: int = 2
) -> Timed:
    """Time all variants in turn, every round in another order, with a matmul in between."""
    clock, (matmul, flops) = Clock(device, o.clock), peak(device, o.precision)
    for run in (*runs, matmul):
        for _ in range(warm):
            run()
    found = Timed([[] for _ in runs])
    for number in range(o.rounds):
        for offset in range(len(runs)):
            i = (number + offset) % len(runs)
            found.seconds[i].append(clock(runs[i]))
        found.peaks.append(flops / min(clock(matmul) for _ in range(5)))
    return found


def kept_bytes(run: Callable[[], Any], model: torch.nn.Module) -> int:
    """Bytes that a forward pass keeps for its backward pass, parameters apart."""
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in known:
            held[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        # The result keeps the graph, hence every storage, alive until it is counted.
        result = run()
    del result
    return sum(held.values())


def step_memory(step: Step) -> tuple[int, bool]:
    """Peak bytes of a training step, and whether measured (CUDA) or counted (kept and states)."""
    if step.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(), True
    states = sum(p.numel() * p.element_size() for p in step.update.params) * 5
    return states + kept_bytes(step.loss, step.model), False


def measure(o: BenchOptions, size: str, tokens: int, device: torch.device) -> list[dict[str, Any]]:
    """Time the variants of one size and number of tokens; return one row each."""
    variants = cases(o, size, tokens)
    steps = [Step(case, o, device) for case in variants]
    runs: list[Callable[[], Any]] = list(steps)
    if o.graphs:
        from experiments.benchmark.cuda_graphs import GraphedStep

        runs = [GraphedStep(s) if s.case.backbone != "plain" else s for s in steps]
    elsewhere = {}
    if device.type == "cpu":
        from experiments.benchmark.variant_process import StepElsewhere

        plain = (i for i, case in enumerate(variants) if case.backbone == "plain")
        elsewhere = {i: StepElsewhere(variants[i], o) for i in plain}
    timed = interleave([elsewhere.get(i, run) for i, run in enumerate(runs)], o, device)
    for step_elsewhere in elsewhere.values():
        step_elsewhere.close()
    rows = []
    for i, (case, step) in enumerate(zip(variants, steps, strict=True)):
        dense = next(j for j in range(i, -1, -1) if not variants[j].route)
        count = case.cost(o.depth)
        # Forward and twice as much backward; 2 FLOPs a MAC.
        flops = 2 * 3 * count.macs_routed * o.batch
        memory, measured = step_memory(step)
        row: dict[str, Any] = {
            "backbone": case.backbone,
            "size": case.size,
            "tokens": case.tokens,
            "route": str(step.route),
            "rate": case.rate,
            "device": device.type,
            "seconds": timed.median(i),
            "images_per_s": o.batch / timed.median(i),
            "flops_per_s": flops / timed.median(i),
            "share_of_peak": timed.share_of_peak(i, flops),
            "memory_bytes": memory,
            "memory_measured": measured,
            "macs_per_image": count.macs_routed,
            "rounds": timed.seconds[i],
        }
        if dense != i:
            row["speedup"] = timed.ratio(dense, i)
            row["allowed"] = count.speedup
            row["of_allowed"] = row["speedup"] / row["allowed"]
        if case.backbone == "plain":
            ours = next(
                j
                for j, c in enumerate(variants)
                if c.backbone == "dit" and bool(c.route) == bool(case.route)
            )
            row["ours_faster_by"] = timed.ratio(i, ours)
        rows.append(row)
    rows[0]["matmul_flops_per_s"] = max(timed.peaks)
    return rows
