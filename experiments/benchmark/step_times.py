"""Training steps timed in turn: the real `Trainer` on random latents, and a plain DiT beside it.

Variants run in turn in one process, so that a busy machine slows all alike; what is reported is the
median over rounds of ratios within a round.

The plain DiT with TREAD is built as the official code is, from the description of that structure,
not from its text: each block projects its own modulation, time and label embedders are apart, and a
route draws a random permutation per sample, keeps its head unsorted, gathers with an expanded
index, keeps a clone of all tokens and scatters into another clone. Optimizer and EMA are torch's
defaults, parameter by parameter. `compile=blocks` compiles its blocks as it does ours: the official
code has torch.compile on their forward pass.
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
from torch import Tensor, nn

from backbones.cost import Cost, cost
from backbones.heads import sincos_2d, unpatchify
from backbones.ops.dispatch import without_native
from backbones.sizes import Size, parse_size
from experiments.benchmark.bench_options import BenchError, BenchOptions
from experiments.components import compile_blocks
from experiments.config.schema import Config, TrainConfig
from experiments.data.data_options import DataOptions
from experiments.data.dataset import Batch, Dataset
from experiments.diffusion import create_objective
from experiments.training.build import build_step
from experiments.training.cuda_graphs import EAGER
from routing.options import RoutingOptions
from routing.rng import Draws
from routing.route import Route

CLASSES = 1000


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
        """Return what a row of figures says of it."""
        route = self.route.resolve(parse_size(self.size, depth).depth)
        about = {"backbone": self.backbone, "size": self.size, "tokens": self.tokens}
        return about | {"route": str(route)}

    def cost(self, depth: int | None) -> Cost:
        """Count this step's forward pass."""
        family = "dit" if self.backbone == "plain" else self.backbone
        return cost(family, self.size, route=self.route, input_size=self.side, depth=depth)


def cases(o: BenchOptions, size: str, tokens: int) -> list[Case]:
    """Return the variants that are compared with each other, every dense one before its routed."""
    route, found = Route.parse(o.route), []
    for name in [*o.backbone, *["plain"] * (o.plain and "dit" in o.backbone)]:
        rates = o.rate[:1] if name == "plain" else o.rate
        routed = [(route.with_rate(rate), rate) for rate in rates if route]
        found += [Case(name, size, tokens, *one) for one in ((Route(()), 0.0), *routed)]
    return found


# --- one step ------------------------------------------------------------------------------------


class RandomLatents(Dataset):
    """Normal latents (4, side, side) of 1000 classes in memory, as often as they are asked for."""

    fingerprint = ""
    cannot_decode = "the benchmark's latents are random numbers"

    def __init__(self, side: int, count: int, device: torch.device) -> None:
        super().__init__(DataOptions("latents", sigma_data=1.0), device=device)
        self.shape, self.num_classes, self.sizes = (4, side, side), CLASSES, {"train": None}
        rows = torch.randn(count, *self.shape, generator=torch.Generator().manual_seed(1))
        self.x, self.y = rows.to(device), torch.arange(count, device=device) % CLASSES

    def batch(self, index: Tensor, draws: Draws | None = None, split: str = "train") -> Batch:
        """Return latents and labels."""
        at = (index % len(self.x)).to(self.device, non_blocking=True)
        return Batch(self.x[at], self.y[at])

    def to_pixels(self, x: Tensor) -> Tensor:
        """Refuse."""
        raise BenchError(self.cannot_decode)


class Step:
    """One variant of the real training step, ready to run: call it for one step."""

    def __init__(self, case: Case, o: BenchOptions, device: torch.device) -> None:
        self.device = device
        route, none = str(case.route), {"name": "none"}
        config = Config(
            seed=0, scale="bench", size=case.size, route=route, task="class",
            backbone={"name": case.backbone, "depth": o.depth}, data={"name": "latents"},
            objective={"name": "flow"}, sampler=none, guidance=none, eval=none,
            routing=RoutingOptions(route, selection=o.selection, fp32_after=o.fp32_after),
            train=TrainConfig(
                batch=o.batch, clip=1.0, precision=o.precision, compile=o.compile, graphs=o.graphs
            ),
        )  # fmt: skip
        data = RandomLatents(case.side, o.batch, device)
        # What a step asks of an `accelerate.Accelerator`.
        alone = SimpleNamespace(device=device, num_processes=1, process_index=0)
        self.training_step = build_step(config, alone, data)
        self.model, self.state = self.training_step.model, self.training_step.state
        self.params, self.ema = self.state.params, self.state.ema
        self.rows = torch.arange(o.batch)
        open_gates(self.model)

    def loss(self) -> Tensor:
        """Draw and run the forward pass."""
        return self.training_step.loss(self.rows)

    def __call__(self) -> None:
        """Take one step."""
        self.training_step.run()
        self.state.step += 1


def make_step(case: Case, o: BenchOptions, device: torch.device) -> Step | PlainStep:
    """Return a variant's step: ours, or that of the plain reimplementation."""
    return (PlainStep if case.backbone == "plain" else Step)(case, o, device)


@torch.no_grad()
def open_gates(model: torch.nn.Module) -> None:
    """Leave the zeros of adaLN-zero behind: multiplying by zero is no fair arithmetic."""
    generator = torch.Generator().manual_seed(2)
    for p in model.parameters():
        if p.requires_grad and not bool(p.any()):
            noise = torch.randn(p.shape, generator=generator) * 0.02
            p.copy_(noise.to(p.device))


# --- timing --------------------------------------------------------------------------------------


def peak(device: torch.device, precision: str) -> tuple[Callable[[], Any], int]:
    """Return a big matmul and its FLOPs: what this device can do at best."""
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
    warm = EAGER + 1 if o.graphs else 2  # a step is recorded after so many

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
    timed, peaks = interleave(steps, o, device)
    # What a row is held against: its dense step, and ours of the same route.
    places = {(case.backbone, str(case.route)): i for i, case in enumerate(variants)}
    rows = []
    for i, (case, step) in enumerate(zip(variants, steps, strict=True)):
        count = case.cost(o.depth)
        # Forward and twice as much backward; 2 FLOPs a MAC.
        flops = 2 * 3 * count.macs_routed * o.batch
        seconds = float(np.median(timed[i]))
        row: dict[str, Any] = {
            **case.names(o.depth),
            "rate": case.rate,
            "device": device.type,
            "seconds": seconds,
            "images_per_s": o.batch / seconds,
            "flops_per_s": flops / seconds,
            "share_of_peak": ratio(flops / timed[i], peaks),
            # A replayed graph allocates nothing: its memory is what the recording took.
            "memory_bytes": None if o.graphs else step_memory(step, device),
            "memory_measured": device.type == "cuda" and not o.graphs,
            "macs_per_image": count.macs_routed,
            "rounds": timed[i].tolist(),
        }
        if case.route:
            row["speedup"] = ratio(timed[places[case.backbone, "none"]], timed[i])
            row["allowed"] = count.speedup
            row["of_allowed"] = row["speedup"] / row["allowed"]
        if case.backbone == "plain":
            row["ours_faster_by"] = ratio(timed[i], timed[places["dit", str(case.route)]])
        rows.append(row)
    rows[0]["matmul_flops_per_s"] = float(peaks.max())
    return rows


def compare(o: BenchOptions, size: str, tokens: int, device: torch.device) -> list[dict[str, Any]]:
    """Time steps as they are against `o.variants` of them; return a row for each step.

    `faster` has by variant how many times as fast as the step itself it is.
    """
    rows = []
    for case in cases(dataclasses.replace(o, plain=False, rate=o.rate[:1]), size, tokens):
        runs: list[Callable[[], Any]] = [Step(case, o, device)]
        for words in (name.split("+") for name in o.variants):
            precision = "bf16" if "bf16" in words else o.precision
            compiled = "blocks" if "compiled" in words else o.compile
            other = dataclasses.replace(o, precision=precision, compile=compiled)
            step = Step(case, other, device)
            runs.append(without_native()(step) if "torch" in words else step)
        timed, _ = interleave(runs, o, device)
        rows.append({
            **case.names(o.depth),
            "seconds": float(np.median(timed[0])),
            "faster": {n: ratio(timed[0], t) for n, t in zip(o.variants, timed[1:], strict=True)},
            "rounds": timed.tolist(),
        })  # fmt: skip
    return rows


# --- a plain DiT ----------------------------------------------------------------------------------


def _modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class PlainBlock(nn.Module):
    """Attention and MLP, timm's, with adaLN-zero from this block's own projection of c."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        # Here: timm brings torchvision, which our own blocks do without.
        from timm.layers import GELUTanh, Mlp
        from timm.models.vision_transformer import Attention

        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.attention = Attention(width, heads, qkv_bias=True)
        self.mlp = Mlp(width, 4 * width, act_layer=GELUTanh)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        """Run both branches on (B, T, D) under c (B, D)."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).chunk(6, dim=1)
        x = x + gate1.unsqueeze(1) * self.attention(_modulated(self.norm1(x), shift1, scale1))
        return x + gate2.unsqueeze(1) * self.mlp(_modulated(self.norm2(x), shift2, scale2))


class PlainDiT(nn.Module):
    """DiT for square inputs of 4 channels, with a route or none."""

    def __init__(self, shape: Size, side: int, route: Route) -> None:
        super().__init__()
        width, patch, channels = shape.width, shape.patch, 4
        self.patch, self.route = patch, route
        self.embed = nn.Conv2d(channels, width, patch, patch)
        self.grid = (side // patch, side // patch)
        self.position = nn.Parameter(sincos_2d(width, self.grid)[None], requires_grad=False)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.labels = nn.Embedding(CLASSES + 1, width)
        self.blocks = nn.ModuleList(PlainBlock(width, shape.heads) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.out = nn.Linear(width, patch * patch * channels)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Predict from images (B, C, H, W), times (B,) and labels (B,)."""
        x = self.embed(x).flatten(2).transpose(1, 2) + self.position
        waves = torch.exp(-math.log(10000) * torch.arange(128, device=t.device) / 128)
        angles = t[:, None].float() * waves
        c = self.time(torch.cat((angles.cos(), angles.sin()), 1)) + self.labels(y)
        rates = {s.start: s.rate for s in self.route.segments}
        ends = {s.end for s in self.route.segments}
        saved, index = x, torch.empty(0)
        for i, block in enumerate(self.blocks):
            if i in rates:
                keep = x.shape[1] - int(x.shape[1] * rates[i])
                order = torch.argsort(torch.rand(x.shape[:2], device=x.device), dim=1)
                index = order[:, :keep, None].expand(-1, -1, x.shape[2])
                saved = x.clone()
                x = torch.gather(x, 1, index)
            x = block(x, c)
            if i in ends:
                x = saved.clone().scatter_(1, index, x.to(saved.dtype))
        shift, scale = self.modulation(c).chunk(2, dim=1)
        return unpatchify(self.out(_modulated(self.norm(x), shift, scale)), self.grid, self.patch)


class PlainStep:
    """A training step as a plain loop has it, always on one batch of latents and labels."""

    def __init__(self, case: Case, o: BenchOptions, device: torch.device) -> None:
        shape, data = parse_size(case.size, o.depth), RandomLatents(case.side, o.batch, device)
        torch.manual_seed(0)
        self.model = PlainDiT(shape, case.side, case.route.resolve(shape.depth)).to(device)
        if o.compile == "blocks":
            compile_blocks(self.model.blocks)
        open_gates(self.model)
        self.x, self.y, self.half, self.count = data.x, data.y, o.precision == "bf16", 0
        self.rows, self.objective = torch.arange(o.batch, device=device), create_objective("flow")
        self.params = [p for p in self.model.parameters() if p.requires_grad]
        self.ema = [p.detach().clone() for p in self.params]
        self.optimizer = torch.optim.AdamW(self.params, lr=1e-4, weight_decay=0.0)

    def loss(self) -> Tensor:
        """Draw and run the forward pass."""
        draws = Draws(0, self.count, self.rows)
        drop = draws.uniform("drop", 1)[:, 0] < 0.1
        y = torch.where(drop, CLASSES, self.y)
        noise, time = draws.normal("noise", tuple(self.x.shape[1:])), self.objective.times(draws)
        with torch.autocast(self.x.device.type, torch.bfloat16, enabled=self.half):
            pair = self.objective.training_pair(self.x, noise, time)
            output = self.model(pair.inputs, pair.time, y=y)
            return self.objective.loss_map(output, pair).mean()

    def __call__(self) -> None:
        """Take one step: the average follows one tensor after the other."""
        self.loss().backward()
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for average, p in zip(self.ema, self.params, strict=True):
                average.mul_(0.9999).add_(p, alpha=1 - 0.9999)
        self.count += 1
