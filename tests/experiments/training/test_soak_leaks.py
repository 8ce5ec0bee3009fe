"""Many steps of a tiny model: neither memory nor open files grow.

SOAK_STEPS=100000 pytest -m soak tests/experiments/training/test_soak_leaks.py -s    (the default; hours on two cores: see the figure that it prints)
"""

import os

import numpy as np
import psutil
import pytest
from small import small
from training_runs import after_each_step, make_run

from experiments.training.session import train

STEPS = int(os.environ.get("SOAK_STEPS", "100000"))
WARM = 0.2  # share of the steps in which caches may fill
# Bytes per step that noise of the allocator may look like; 100,000 steps of a real leak of one float32
# per token (64 x 4 bytes) would be 25 MB.
LEAK = 200.0


@pytest.mark.soak
@pytest.mark.parametrize("route", ["none", "1--2"])
def test_training_leaks_neither_memory_nor_files(tmp_path, route, monkeypatch):
    process, looks = psutil.Process(), []

    def look(training_step):
        step = training_step.state.step
        if step >= WARM * STEPS and step % max(STEPS // 1000, 1) == 0:
            looks.append((step, process.memory_info().rss, process.num_fds(), process.num_threads()))

    after_each_step(monkeypatch, look)
    every = max(STEPS // 20, 10)
    words = ["backbone.width=16", f"train.steps={STEPS}", "train.batch=4", "train.log_every=50"]
    words += [f"train.save_every={every}", f"train.sample_every={every}"]
    config = small(tmp_path, f"route={route}", *words)
    train(config)
    assert len(looks) >= 20, f"only {len(looks)} looks: raise SOAK_STEPS"
    steps, memory, files, threads = zip(*looks, strict=True)
    per_step = np.polyfit(steps, memory, deg=1)[0]
    print(
        f"route={route}: {per_step:.1f} bytes a step, RSS {memory[0] / 2**20:.1f} to {memory[-1] / 2**20:.1f} MB, "
        f"files {min(files)} to {max(files)}"
    )
    # Over few steps the allocator's steps of pages are most of the slope: 2 MB are let pass.
    assert per_step * (steps[-1] - steps[0]) < max(2 * 2**20, LEAK * STEPS * (1 - WARM))
    # A checkpoint or a picture may be open at the moment of a look; what stays open adds up.
    quarter = len(looks) // 4
    assert min(files[-quarter:]) <= min(files[:quarter]), files
    assert max(threads[-quarter:]) <= max(threads[:quarter])
    log = (config.folder / "metrics.jsonl").stat().st_size
    assert log < STEPS / 50 * 600, "the log of metrics grows faster than its lines"


def test_the_average_of_weights_has_no_history(tmp_path):
    """An average that autograd follows keeps something of every step: 25 KB each, for this tiny model."""
    run = make_run(small(tmp_path))
    for _ in range(3):
        run.training_step.run()
        tensors = [*run.state.ema, run.state.tally.values]
        assert not any(tensor.requires_grad or tensor.grad_fn is not None for tensor in tensors)
