"""Time single blocks, and the training loop around the steps.

The loop is the real one, on the digits at scale `tiny`, with its files. Everything except forward,
backward and optimizer (batches, noise, subsets, clipping, EMA, logging, checkpoints) is overhead.

Single blocks are a middle one of each family, forward and backward in turn, by number of tokens:
they show from where on attention is no longer the cheapest. The report also has the bytes per token
that a block keeps for its backward pass: constant if memory is linear in tokens.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import backbones
from backbones.sizes import parse_size
from experiments.benchmark.bench_options import BenchOptions
from experiments.benchmark.step_times import interleave, kept_bytes, ratio
from experiments.components import make_accelerator
from experiments.config.compose import load
from experiments.runtime.console import Console
from experiments.runtime.errors import ROOT
from experiments.training.loop import Trainer
from routing.layout import Layout

# --- the loop's own share ------------------------------------------------------------------------

LOOP_STEPS = 24
_QUIET = ("eval=none", "train.sample_every=0", "data=digits", "scale=tiny")


def loop_share(backbone: str, clock: str = "wall", steps: int = LOOP_STEPS) -> dict[str, Any]:
    """Train `steps` steps to warm up and as many more, and time the parts."""
    now = time.process_time if clock == "cpu" else time.perf_counter
    spent = {"work": 0.0, "save": 0.0}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        start = now()
        yield
        spent[name] += now() - start

    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"backbone={backbone}", "route=2-8", *_QUIET, f"paths.runs={folder}"]
        config = load([*overrides, f"train.steps={2 * steps}"])
        config.folder.mkdir(parents=True)
        run = Trainer(config, make_accelerator(config), Console(quiet=True))
        for owner, method, part in (
            (run.model, "forward", "work"),
            (run.training_step, "backward", "work"),
            (run.state.optimizers[0], "step", "work"),
            (run, "save", "save"),
        ):
            setattr(owner, method, timed(part)(getattr(owner, method)))
        vars(run)["evaluate"] = lambda *_, **__: None  # no samples at the last step
        run.fit(steps)
        spent.update(work=0.0, save=0.0)
        start = now()
        run.fit()
        total = now() - start
    # There was one save, at the last step; a run saves once in `save_every` steps.
    step_s = (total - spent["save"]) / steps + spent["save"] / config.train.save_every
    overhead_s = step_s - spent["work"] / steps
    return {
        "backbone": backbone,
        "step_s": step_s,
        "overhead_s": overhead_s,
        "overhead": overhead_s / step_s,
        "save_s": spent["save"],
    }


def first_step(backbone: str) -> float:
    """Return the seconds from typing the main command to the end of its first step."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"backbone={backbone}", "route=2-8", *_QUIET, f"paths.runs={folder}"]
        script = str(ROOT / "experiments" / "run.py")
        command = [sys.executable, script, *overrides, "train.steps=1"]
        start = time.time()
        subprocess.run([*command, "sampler.steps=1"], capture_output=True, check=True)
        (metrics_file,) = Path(folder).glob("*/metrics.jsonl")  # written at the only step
        return metrics_file.stat().st_mtime - start


# --- one block ------------------------------------------------------------------------------------


# Tokens times channels in a batch, so that linear operators do the same work at all lengths.
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
        """Run the block forward and backward."""
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
                saved_bytes = kept_bytes(block.forward, block.block)
                rows[-1][name] = {
                    "seconds_per_image": float(np.median(seconds)) / batch,
                    "relative": ratio(seconds, timed[0]),
                    "kept_bytes_per_token": saved_bytes / (batch * tokens),
                }
    return rows


def crossings(rows: list[dict[str, Any]], names: Sequence[str]) -> dict[str, int | None]:
    """Return for each family after the first the number of tokens from which on it is cheaper."""
    crossing: dict[str, int | None] = {}
    for name in names[1:]:
        crossing[name] = None
        for row in sorted(rows, key=lambda row: row["tokens"], reverse=True):
            if row[name]["relative"] >= 1:
                break
            crossing[name] = row["tokens"]
    return crossing
