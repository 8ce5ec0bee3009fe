"""`train.precision=auto`: which precision trains this model faster here, settled once for a run."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import replace
from typing import Any

import torch

from experiments.config.schema import Config
from experiments.runtime.console import Console
from experiments.runtime.files import atomic_write
from experiments.training import build
from experiments.training.loop import Trainer

KEPT = "precision.json"
ROUNDS = 3
# What bf16 has to gain: more than a measurement's noise, since it rounds.
WORTH = 1.05


def settled(config: Config, *, quiet: bool = False) -> Config:
    """Return the configuration of a run typed with `auto`: fp32 or bf16 stands in its place.

    The run's folder remembers that it was settled (`precision.json`), so that the same command
    goes on in it, on any machine; without one, steps of both are timed.
    """
    runs = config.settled()
    accelerator = build.make_accelerator(replace(runs[0], log="none"))
    first = accelerator.is_main_process
    console = Console(quiet or not first)

    def agreed(value: Any) -> Any:
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([value])[0] if accelerator.num_processes > 1 else value

    known = agreed(next((run for run in runs if (run.folder / KEPT).exists()), None))
    if known is not None:
        console.say(f"precision   {known.train.precision}: settled by an earlier start of this run")
        return known
    ratio = agreed(bf16_speed(runs, accelerator))
    chosen = runs[ratio > WORTH]
    console.say(
        f"precision   {chosen.train.precision}: bf16 is {ratio:.2f} times as fast as fp32 here "
        f"({ROUNDS} forward and backward passes of each, in turn)"
    )
    if first:
        found = {"asked": "auto", "precision": chosen.train.precision, "bf16_speed": ratio}
        atomic_write(chosen.folder / KEPT, json.dumps(found))
    return chosen


def bf16_speed(runs: list[Config], accelerator: Any) -> float:
    """Time passes of a fresh model in fp32 and bf16, in turn; return the median ratio."""
    trainer = Trainer(runs[0], accelerator, Console(quiet=True))
    trainer.model.train()
    low, high = trainer.pieces[0]
    rows = torch.arange(trainer.first + low, trainer.first + high)
    batch, _, _ = trainer.drawn(rows, None)
    wait = torch.cuda.synchronize if trainer.device.type == "cuda" else lambda: None

    def seconds(run: Config) -> float:
        trainer.config = run
        wait()
        began = time.perf_counter()
        trainer.backward(trainer.loss(rows, batch))
        wait()
        trainer.state.optimizer.zero_grad()
        return time.perf_counter() - began

    pairs = [[seconds(run) for run in runs] for _ in range(1 + ROUNDS)]
    return statistics.median(fp32 / bf16 for fp32, bf16 in pairs[1:])
