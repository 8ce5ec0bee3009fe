"""The training loop's own share of a run at scale `tiny`, and the time until its first step.

The loop is the real one: `experiments.training.loop.Run` on the digits, with its files. What is
neither forward, backward nor optimizer (batches, noise, subsets, clipping, EMA, logging,
checkpoints) is overhead.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from experiments.benchmark.bench_options import BenchOptions
from experiments.runtime.command import ROOT

STEPS = 24
_QUIET = ("eval=none", "train.sample_every=0", "data=digits", "scale=tiny")


class Stopwatch:
    """Adds up the seconds between `start` and `stop`."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now, self.total, self._began = now, 0.0, 0.0

    def start(self, *_: Any) -> None:
        """Begin."""
        self._began = self.now()

    def stop(self, *_: Any) -> None:
        """End."""
        self.total += self.now() - self._began


def measure(o: BenchOptions) -> list[dict[str, Any]]:
    """Return per family the seconds of a step, the loop's share and the time to the first step."""
    return [loop(name, o.clock) | {"first_step_s": first_step(name)} for name in o.backbone]


def loop(backbone: str, clock: str = "wall", steps: int = STEPS) -> dict[str, Any]:
    """Train a few steps and time the parts.

    Args:
        backbone: Family.
        clock: `wall` or `cpu`.
        steps: Timed steps; as many before them warm up.
    """
    from experiments.config.compose import load
    from experiments.runtime import console
    from experiments.training import build
    from experiments.training.loop import Run

    now = time.process_time if clock == "cpu" else time.perf_counter
    with tempfile.TemporaryDirectory() as folder:
        config = load(
            [f"backbone={backbone}", "route=2-8", *_QUIET, f"train.steps={2 * steps}"]
            + [f"paths.runs={folder}"]
        )
        config.folder.mkdir(parents=True)
        work = Run(config, build.make_accelerator(config), console.Console(quiet=True))
        watch, whole, saving = Stopwatch(now), Stopwatch(now), Stopwatch(now)
        work.model.register_forward_pre_hook(watch.start)
        work.model.register_forward_hook(watch.stop)
        optimizer: Any = work.optimizer
        optimizer.register_step_pre_hook(watch.start)
        optimizer.register_step_post_hook(watch.stop)
        backward = torch.Tensor.backward

        def timed(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            watch.start()
            backward(self, *args, **kwargs)
            watch.stop()

        save = work.save

        def save_timed() -> None:
            saving.start()
            save()
            saving.stop()

        def begin(*_: Any, **__: Any) -> None:
            # The first half has warmed up: from here on it counts.
            if work.step == steps:
                watch.total = 0.0
                whole.start()

        due = mock.patch.object(work, "due", begin)
        saves = mock.patch.object(work, "save", save_timed)
        with mock.patch.object(torch.Tensor, "backward", timed), due, saves:
            work.fit()
            whole.stop()
    # The one save was that of the last step; a run has one in so many steps.
    save_s = saving.total / config.train.save_every
    work_s = watch.total / steps
    step_s = (whole.total - saving.total) / steps + save_s
    return {
        "backbone": backbone,
        "step_s": step_s,
        "overhead_s": step_s - work_s,
        "overhead": (step_s - work_s) / step_s,
        "save_s": saving.total,
    }


def first_step(backbone: str) -> float:
    """Return the seconds from typing the main command to the end of its first step."""
    with tempfile.TemporaryDirectory() as folder:
        script = str(ROOT / "experiments" / "run.py")
        words = [f"backbone={backbone}", "route=2-8", *_QUIET, f"paths.runs={folder}"]
        command = [sys.executable, script, *words, "train.steps=2", "train.log_every=1"]
        began = time.monotonic()
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            while not any(p.stat().st_size for p in Path(folder).glob("*/metrics.jsonl")):
                if process.poll() not in (None, 0):
                    raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
                time.sleep(0.02)
            took = time.monotonic() - began
        return took
