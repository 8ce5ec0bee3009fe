"""A run of six steps beside one that stops after three and is resumed."""

from __future__ import annotations

from pathlib import Path

import torch
from small import small
from test_train_loop import make_run

from experiments.runtime import run_folder
from experiments.training.loop import Trainer


def assert_resumes_bit_for_bit(folder: Path, words: list[str]) -> Trainer:
    """Compare weights and EMA of both after six steps; return the run that was not stopped."""
    straight = make_run(small(folder / "straight", *words))
    straight.fit()
    stopped = make_run(small(folder / "stopped", *words))
    stopped.fit(3)
    resumed = make_run(small(folder / "stopped", *words))
    resumed.state.load(run_folder.step_folder(resumed.folder, 3), resumed.config.hashed())
    resumed.fit()
    assert resumed.state.step == straight.state.step == 6
    expected = straight.state.params + straight.state.ema
    for one, other in zip(expected, resumed.state.params + resumed.state.ema, strict=True):
        assert torch.equal(one, other)
    return straight
