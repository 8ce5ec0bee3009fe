"""A training that only counts: the files, signals and exit of a real run, in milliseconds a step.

It reads `stub.json` in the folder of runs: {"*": {...}, "3": {...}} by seed, with `sleep` (seconds a step),
`fail` (step at which it raises), `save_every`, `memory_mb` (that it holds), `stuck` (never saves), `weights` (written at the end).
"""

import json
import math
import os
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from experiments.config import load
from experiments.runtime import run_folder, signals
from experiments.runtime.errors import Interrupted
from experiments.runtime.files import atomic_write
from experiments.runtime.locks import locked
from experiments.runtime.records import append_jsonl


def agreed(reason):
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return reason
    import torch
    import torch.distributed as dist

    codes = ["", *signals.NAMES]
    mine = torch.tensor([codes.index(reason or "")])
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return codes[int(mine)] or None


def main(overrides):
    config = load(overrides)
    folder, rank = config.folder, int(os.environ.get("RANK", 0))
    known = run_folder.read(folder.parent / "stub.json")
    options = {"sleep": 0.02, "save_every": 5} | known.get("*", {}) | known.get(str(config.seed), {})
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        import torch.distributed as dist

        from experiments.runtime.processes import leave_at_exit

        dist.init_process_group("gloo")
        leave_at_exit()
    with signals.installed():
        if rank:
            return work(config, folder, options, write=False)
        with locked(folder):
            return work(config, folder, options, write=True)


def work(config, folder, options, write):
    step, steps = run_folder.saved_step(folder), config.train.steps

    def tell(status, **more):
        if write:
            values = {"status": status, "step": step, "steps": steps, "time": time.time(), **more}
            atomic_write(folder / "status.json", json.dumps(values))

    def save():
        if write and not options.get("stuck"):
            (folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True, exist_ok=True)

    tell("running", images_per_s=10.0, eta_s=5)
    ballast = np.ones(int(options.get("memory_mb", 0) * 2**17))  # 8 bytes each
    while step < steps:
        time.sleep(options["sleep"])
        step += 1
        if step == options.get("fail"):
            tell("failed", error="RuntimeError: the loss is not a number")
            raise RuntimeError(f"the loss is not a number at step {step}")
        reason = None if options.get("deaf") else agreed(signals.STATE.reason)
        if step % options["save_every"] == 0 or reason or step == steps:
            save()
        every = config.eval.every
        if write and every and (step % every == 0 or step == steps):
            value = 1 + abs(math.log10(config.train.lr / 1e-3)) + 1 / step
            line = {"metric": "FD", "key": "fd", "value": value, "step": step}
            append_jsonl(folder / "scores.jsonl", [line])
        tell("running", images_per_s=10.0, eta_s=(steps - step) * options["sleep"])
        if reason and step < steps:
            tell("preempted")
            raise Interrupted(reason, step)
    if write:
        with (folder / "ends.txt").open("a") as handle:
            handle.write(f"{os.getpid()}\n")
        world = os.environ.get("WORLD_SIZE", "1")
        summary = {"status": "done", "step": step, "images_per_s": 10.0, "scores": {"FD": 1.5}, "world": world}
        summary |= {"master": os.environ.get("MASTER_ADDR", "")}
        summary |= {"threads": os.environ.get("OMP_NUM_THREADS"), "ballast": len(ballast)}
        summary |= {"gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}
        summary |= {"diverged": options.get("diverged", False)}
        if options.get("weights"):  # that a run of a later stage starts from
            values = np.full(3, config.seed + step, np.float32)
            save_file({"ema.w": values}, folder / "model.safetensors")
        atomic_write(Path(folder) / "summary.json", json.dumps(summary))
    return 0
