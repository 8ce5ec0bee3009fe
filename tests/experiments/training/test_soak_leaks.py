"""Many steps of a tiny model: neither memory nor open files grow.

SOAK_STEPS=100000 pytest -m soak tests/experiments/training/test_soak_leaks.py -s    (the default; hours on two cores: see the figure that it prints)
"""

from __future__ import annotations

import os
import threading
import time

import psutil
import pytest
from small import small

STEPS = int(os.environ.get("SOAK_STEPS", "100000"))
WARM = 0.2  # share of the steps in which caches may fill
# Bytes per step that noise of the allocator may look like; 100,000 steps of a real leak of one float32
# per token (64 x 4 bytes) would be 25 MB.
LEAK = 200.0


def slope(points):
    """Return the least-squares slope of (x, y)."""
    n = len(points)
    mx, my = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    return sum((x - mx) * (y - my) for x, y in points) / sum((x - mx) ** 2 for x, _ in points)


class Watch(threading.Thread):
    """Note the step of the heartbeat, resident memory, open files and threads, twice a second."""

    def __init__(self, folder):
        super().__init__(daemon=True)
        self.folder, self.over, self.rows = folder, threading.Event(), []

    def run(self):
        from experiments.runtime.run_folder import read

        me = psutil.Process()
        while not self.over.wait(0.5):
            step = read(self.folder / "status.json").get("step")
            if isinstance(step, int):
                self.rows.append((step, me.memory_info().rss, me.num_fds(), me.num_threads()))


@pytest.mark.soak
@pytest.mark.parametrize("route", ["none", "1--2"])
def test_training_leaks_neither_memory_nor_files(tmp_path, route):
    from experiments.training.session import train

    every = max(STEPS // 20, 10)
    config = small(
        tmp_path, f"route={route}", "backbone.width=16", f"train.steps={STEPS}", "train.batch=4",
        "train.log_every=50", f"train.save_every={every}", f"train.sample_every={every}",
    )  # fmt: skip
    watch = Watch(config.folder)
    start = time.monotonic()
    watch.start()
    try:
        train(config)
    finally:
        watch.over.set()
        watch.join()
    spent = time.monotonic() - start
    # The last pictures and the exported weights come after the last step: they are no leak.
    late = [row for row in watch.rows if WARM * STEPS <= row[0] < STEPS]
    assert len(late) >= 20, f"only {len(late)} looks in {spent:.0f} s: raise SOAK_STEPS"
    per_step = slope([(step, rss) for step, rss, *_ in late])
    files = [row[2] for row in late]
    tenths = [late[i * (len(late) - 1) // 10][1] // 2**20 for i in range(11)]
    print(
        f"route={route}: {STEPS} steps in {spent:.0f} s, {per_step:.1f} bytes a step, RSS "
        f"{late[0][1] / 2**20:.1f} to {late[-1][1] / 2**20:.1f} MB, files {min(files)} to {max(files)}, MB by tenths {tenths}"
    )
    # Over few steps the allocator's steps of pages are most of the slope: 2 MB are let pass.
    assert per_step * (late[-1][0] - late[0][0]) < max(2 * 2**20, LEAK * STEPS * (1 - WARM))
    # A checkpoint or a picture may be open at the moment of a look; what stays open adds up.
    quarter = len(files) // 4
    assert min(files[-quarter:]) <= min(files[:quarter]), files
    assert max(row[3] for row in late[-quarter:]) <= max(row[3] for row in late[:quarter])
    log = (config.folder / "metrics.jsonl").stat().st_size
    assert log < STEPS / 50 * 600, "the log of metrics grows faster than its lines"


def test_the_average_of_weights_has_no_history(tmp_path, monkeypatch):
    """An average that autograd follows keeps something of every step: 25 KB each, for this tiny model."""
    from experiments.training.session import train
    from experiments.training.step import TrainingStep

    looks = []
    whole = TrainingStep.run

    def run(self):
        whole(self)
        looks.append(any(t.requires_grad or t.grad_fn is not None for t in [*self.state.ema, self.state.tally.values]))

    monkeypatch.setattr(TrainingStep, "run", run)
    train(small(tmp_path, "train.steps=3"), quiet=True)
    assert looks == [False] * 3
