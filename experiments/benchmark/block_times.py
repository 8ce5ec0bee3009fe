"""Where a training step's time goes: by part, in single blocks, and in the loop around it.

Parts are named while the step runs: modules, the branches of a block and `routing`'s functions are
wrapped for the time of the profile. An operation counts for the innermost name around it; one in
the backward pass for the part whose forward operation made it (autograd numbers them alike). The
gathers inside a block's norm and gated sum are those of its scan orders; there are hundreds in a
step, and a name around each would cost as much as they do.

The loop is the real one, on the digits at scale `tiny`, with its files. What is neither forward,
backward nor optimizer (batches, noise, subsets, clipping, EMA, logging, checkpoints) is overhead.

Single blocks are a middle one of each family, forward and back in turn, by number of tokens: where
attention stops being the cheapest. Beside the time, what a block keeps for its backward pass, per
token: the same at every length if memory is linear in tokens.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import backbones
from backbones.sizes import parse_size
from experiments.benchmark.bench_options import BenchOptions
from experiments.benchmark.step_times import Step, interleave, kept_bytes, ratio
from experiments.config.compose import load
from experiments.runtime.command import ROOT
from experiments.runtime.console import Console
from experiments.training.build import make_accelerator
from experiments.training.loop import Trainer
from routing.layout import Layout
from routing.stack import StackPass

NORM, SCAN = "norm, gate", "scan order"
PARTS = (
    "draw, loss", "embed", NORM, "mixer", "mlp", "route", SCAN, "head", "gradients", "clip",
    "optimizer", "EMA",
)  # fmt: skip
# Of all parts together, what torch's own kernels take that no native operation is in place of.
WITHIN = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"),
    "fused attention": ("aten::_scaled_dot_product",),
}
ROUTE = ("_order", "_positions", "_gaps", "_neighbours", "_slots")


def _wrap(owner: Any, name: str, around: Callable[[], Any]) -> Callable[[], None]:
    """Run a method inside the context that `around` opens; return what puts it back."""
    inner: Callable[..., Any] = getattr(owner, name)
    own = name in vars(owner)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with around():
            return inner(*args, **kwargs)

    setattr(owner, name, wrapped)
    return partial(setattr, owner, name, inner) if own else partial(delattr, owner, name)


@contextmanager
def _scopes(step: Step) -> Iterator[None]:
    """Name the parts of a step while the block runs."""
    model = step.model
    named: list[tuple[Any, str, str]] = [
        (model.head, "forward", "head"),
        (step.trainer, "clip", "clip"),
        (step.state.optimizer, "step", "optimizer"),
        (step.trainer, "average", "EMA"),
        (model, "embed", "embed"),
        (model.modulate, "forward", "embed"),
        *((StackPass, method, "route") for method in ("open", "gather", "scatter")),
        *((Layout, method, "route") for method in ROUTE),
        *((Layout, method, SCAN) for method in ("to_scan", "from_scan")),
    ]
    for block in model.stack.blocks:
        # A Mamba block's second branch is another mixer.
        parts = ("mixer", "mixer" if hasattr(block, "two") else "mlp")
        for name, part in zip(block.branches, parts, strict=True):
            module = isinstance(getattr(block, name), torch.nn.Module)
            named.append((getattr(block, name), "forward", part) if module else (block, name, part))
        named.append((block, "forward", NORM))
    with ExitStack() as undo:
        for owner, name, part in named:
            around = partial(torch.profiler.record_function, f"part:{part}")
            undo.callback(_wrap(owner, name, around))
        yield


def _around(event: Any, name: str) -> Any:
    """The innermost event around this one whose name begins so, itself included, or None."""
    while event is not None and not event.name.startswith(name):
        event = event.cpu_parent
    return event


def attribute(events: list[Any], clock: str) -> dict[str, float]:
    """Sum the microseconds of a torch profile's operations by part; `clock` is their attribute."""
    made: dict[int, str] = {}  # the part of the operation that made each autograd node
    totals: dict[str, float] = defaultdict(float)
    tasks = {event: _around(event, "autograd::engine::evaluate_function") for event in events}
    # Forward operations come before what their numbers are looked up for; the last operation that
    # carries a number is the one that made the node.
    for event in sorted(events, key=lambda e: (tasks[e] is not None, e.time_range.start)):
        task = tasks[event]
        if task is None:
            named = _around(event, "part:")
            part = "draw, loss" if named is None else named.name.removeprefix("part:")
            if event.sequence_nr >= 0:
                made[event.sequence_nr] = part
        elif "AccumulateGrad" in task.name:
            part = "gradients"
        else:
            part = made.get(task.sequence_nr, "draw, loss")
        scanned = part == NORM and event.name == "aten::index_select"
        totals[SCAN if scanned else part] += getattr(event, clock)
    return totals


def profile(step: Step, rounds: int = 2) -> dict[str, float]:
    """Return each part's share of a step's time, which sum to 1, and the shares of `WITHIN`."""
    kinds = torch.profiler.supported_activities()
    # The time of an operation without those inside it.
    clock = f"self_{'device' if step.device.type == 'cuda' else 'cpu'}_time_total"
    step()
    with _scopes(step):
        step()
        with torch.profiler.profile(activities=kinds, acc_events=True) as seen:
            for _ in range(rounds):
                step()
    events = list(seen.events())
    totals = attribute(events, clock)
    whole = sum(totals.values())
    for kind, names in WITHIN.items():
        totals[kind] = sum(
            getattr(event, clock) for event in events if event.name.startswith(names)
        )
    return {part: totals[part] / whole for part in (*PARTS, *WITHIN)}


# --- the loop's own share ------------------------------------------------------------------------

LOOP_STEPS = 24
_QUIET = ("eval=none", "train.sample_every=0", "data=digits", "scale=tiny")


def loop_share(backbone: str, clock: str = "wall", steps: int = LOOP_STEPS) -> dict[str, Any]:
    """Train `steps` steps to warm up and as many more, and time the parts."""
    now = time.process_time if clock == "cpu" else time.perf_counter
    spent = {"work": 0.0, "save": 0.0}

    @contextmanager
    def counted(what: str) -> Iterator[None]:
        began = now()
        yield
        spent[what] += now() - began

    with tempfile.TemporaryDirectory() as folder:
        words = [f"backbone={backbone}", "route=2-8", *_QUIET, f"paths.runs={folder}"]
        config = load([*words, f"train.steps={steps}"])
        config.folder.mkdir(parents=True)
        run = Trainer(config, make_accelerator(config), Console(quiet=True))
        for owner, name in (
            (run.model, "forward"),
            (run, "backward"),
            (run.state.optimizer, "step"),
        ):
            _wrap(owner, name, partial(counted, "work"))
        _wrap(run, "save", partial(counted, "save"))
        vars(run)["evaluate"] = lambda *_, **__: None  # the pictures of the last step
        run.fit()
        run.config = load([*words, f"train.steps={2 * steps}"])
        spent.update(work=0.0, save=0.0)
        began = now()
        run.fit()
        whole = now() - began
    # The one save was that of the last step; a run has one in so many steps.
    step_s = (whole - spent["save"]) / steps + spent["save"] / config.train.save_every
    overhead_s = step_s - spent["work"] / steps
    found = {"backbone": backbone, "step_s": step_s, "overhead_s": overhead_s}
    return found | {"overhead": overhead_s / step_s, "save_s": spent["save"]}


def first_step(backbone: str) -> float:
    """Return the seconds from typing the main command to the end of its first step."""
    with tempfile.TemporaryDirectory() as folder:
        words = [f"backbone={backbone}", "route=2-8", *_QUIET, f"paths.runs={folder}"]
        command = [sys.executable, str(ROOT / "experiments" / "run.py"), *words, "train.steps=1"]
        began = time.time()
        subprocess.run([*command, "sampler.steps=1"], capture_output=True, check=True)
        # The step's line is the only one.
        (lines,) = Path(folder).glob("*/metrics.jsonl")
        return lines.stat().st_mtime - began


# --- one block ------------------------------------------------------------------------------------


# Tokens times channels in a batch: the same work for linear operators at all lengths.
VALUES = 1 << 21


class BlockRun:
    """Forward and backward of one block of a family, on `batch` samples of `tokens` tokens."""

    def __init__(self, name: str, size: str, tokens: int, batch: int, device: torch.device) -> None:
        side, shape = math.isqrt(tokens), parse_size(size)
        torch.manual_seed(0)
        model = backbones.create(name, size, depth=2, input_size=side * shape.patch, num_classes=0)
        self.block = model.to(device).stack.blocks[1]
        x = torch.randn(batch, tokens, shape.width, device=device, requires_grad=True)
        cond = torch.randn(batch, 6, 1, shape.width, device=device)
        self.forward = partial(self.block, x, cond, Layout((side, side), device=device))

    def __call__(self) -> None:
        """Run the block forward and back."""
        y = self.forward()
        y.backward(y.detach())


def block_times(o: BenchOptions, device: torch.device) -> list[dict[str, Any]]:
    """Time a block of every family at every length; return one row per length."""
    rows: list[dict[str, Any]] = []
    for size in o.size:
        width = parse_size(size).width
        for tokens in o.block_tokens:
            batch = max(1, VALUES // (tokens * width)) if device.type == "cpu" else o.batch
            blocks = [BlockRun(name, size, tokens, batch, device) for name in o.backbone]
            timed, _ = interleave(blocks, o, device)
            rows.append({"size": size, "tokens": tokens, "batch": batch})
            for name, block, seconds in zip(o.backbone, blocks, timed, strict=True):
                kept = kept_bytes(block.forward, block.block)
                rows[-1][name] = {
                    "seconds_per_image": float(np.median(seconds)) / batch,
                    "relative": ratio(seconds, timed[0]),
                    "kept_bytes_per_token": kept / (batch * tokens),
                }
    return rows


def crossings(rows: list[dict[str, Any]], names: Sequence[str]) -> dict[str, int | None]:
    """Return for each family after the first the fewest tokens from which on it is cheaper."""
    found: dict[str, int | None] = {}
    for name in names[1:]:
        dear = max((row["tokens"] for row in rows if row[name]["relative"] >= 1), default=0)
        found[name] = min((row["tokens"] for row in rows if row["tokens"] > dear), default=None)
    return found
