"""The first five losses of each backbone, dense and routed: nothing may change what is learnt unnoticed.

REGENERATE=1 python -m pytest tests/experiments/training/test_golden_losses.py writes the file anew, after a change on purpose.
"""

import os

import pytest
from small import ROOT, small

from experiments import components as build
from experiments.runtime.console import Console
from experiments.training.loop import Trainer

GOLDEN = ROOT / "tests" / "data" / "golden_losses.txt"
HEADER = "# digits, 4 blocks of width 32, batch 8, float32 on a CPU: the loss of steps 1 to 5\n"
CASES = [(b, r) for b in ("dit", "mamba", "rwkv") for r in ("none", "1-2")]
RUN = ("train.steps=5", "train.warmup=0", "train.lr=0.01")


def losses(folder, backbone, route):
    # The gates of adaLN-zero open with the first updates; a large step opens them within five.
    config = small(folder, f"backbone={backbone}", f"route={route}", *RUN)
    run = Trainer(config, build.make_accelerator(config), Console(quiet=True))
    run.model.train()
    found = []
    for _ in range(config.train.steps):
        run.state.tally.zero_()
        run.one_step()
        run.state.step += 1
        found.append(run.state.tally[0].item())
    return found


def golden():
    rows = [line.split() for line in GOLDEN.read_text(encoding="utf-8").splitlines()[1:]]
    return {(row[0], row[1]): [float(number) for number in row[2:]] for row in rows}


@pytest.fixture(scope="module")
def regenerated(tmp_path_factory):
    if os.environ.get("REGENERATE"):
        rows = []
        for case in CASES:
            numbers = losses(tmp_path_factory.mktemp("golden"), *case)
            rows.append(" ".join([*case, *(f"{number:.7f}" for number in numbers)]) + "\n")
        GOLDEN.write_text(HEADER + "".join(rows), encoding="utf-8")


@pytest.mark.usefixtures("regenerated")
@pytest.mark.parametrize(("backbone", "route"), CASES)
def test_first_losses(backbone, route, tmp_path):
    want = golden()[backbone, route]
    assert len(want) == 5
    assert losses(tmp_path, backbone, route) == pytest.approx(want, rel=1e-4)


@pytest.mark.usefixtures("regenerated")
def test_the_numbers_tell_backbones_and_routes_apart():
    last = [golden()[case][-1] for case in CASES]
    for i, one in enumerate(last):
        assert all(abs(one - other) > 1e-3 * one for other in last[i + 1 :])
