"""The real training on a real Slurm cluster (marker `slurm`): interrupted runs end as undisturbed ones do."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from slurm_lab import SlurmLauncher, until, yaml_grid
from small import ROOT

from sweeps.plan import grid

pytestmark = pytest.mark.slurm
SMALL = [
    "backbone.depth=3", "route=0-1", "train.steps=120", "train.batch=8", "train.log_every=1", "train.save_every=1000",
    "train.sample_every=0", "sampler.steps=2", "guidance=none", "eval=none",
]  # fmt: skip


class OneRun(SlurmLauncher):
    """One real run below a folder."""

    def __init__(self, folder, capsys, **resources):
        folder.mkdir()
        super().__init__(folder, capsys)
        yaml_grid(folder, "count", title="One run", base={"backbone": "dit"})
        self.grid = str(folder / "count.yaml")
        self.resources(signal_s=120, **resources)

    def interrupt(self, step):
        subprocess.run(["scancel", "--signal=USR2", self.running(0, step, seconds=240).job], check=True)
        until(lambda: len(self.starts(0)) == 2, 240, f"a second start, {self.rows()}")

    def finished(self):
        self.done(0, seconds=300)
        return Path(self.rows()[0].run.folder)


@pytest.fixture(autouse=True)
def one_thread(cli, monkeypatch):
    """The environment of the cluster, whose queue is empty afterwards; runs train, in place of the stubs of `cli`."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setitem(grid.ENTRIES, "train", "experiments.run:main")


def learnt(folder):
    """What a run learnt and noted, clock times apart."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: line[k] for k in ("step", "loss", "lr", "grad_norm")} for line in lines]
    # The file's head names the folder of runs, which differs.
    weights = {k: v.tobytes() for k, v in load_file(folder / "model.safetensors").items()}
    return weights, kept


def test_a_pre_empted_run_ends_bitwise_as_an_undisturbed_one(tmp_path, capsys):
    calm, shaken = OneRun(tmp_path / "calm", capsys), OneRun(tmp_path / "shaken", capsys)
    calm("launch", *SMALL)
    shaken("launch", *SMALL)
    shaken.interrupt(step=4)
    assert shaken.starts(0)[1]["step"] >= 4 and shaken.starts(0)[1]["restart"] == 1
    ours, theirs = learnt(shaken.finished()), learnt(calm.finished())
    assert [line["step"] for line in ours[1]] == list(range(1, 121))
    assert ours[1] == theirs[1] and ours[0].keys() == theirs[0].keys()
    assert [k for k in ours[0] if ours[0][k] != theirs[0][k]] == []
    assert len(calm.starts(0)) == 1


@pytest.mark.usefixtures("named_nodes")
def test_four_ranks_on_two_nodes_agree_save_and_go_on(tmp_path, capsys):
    one = OneRun(tmp_path / "one", capsys, nodes=2, tasks=2)
    one("launch", *SMALL)
    one.interrupt(step=3)
    folder = one.finished()
    assert one.starts(0)[1]["step"] >= 3
    assert "4 x cpu" in one.log(0, "out") and "(resumed at step" in one.log(0, "out")
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 121))


def test_hydras_own_launcher_works_within_its_limits(tmp_path, monkeypatch):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    # It pickles by reference and knows no snapshot: the packages must be importable on the node.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    small = [word.replace("train.steps=120", "train.steps=2") for word in SMALL]
    words = ["-m", "hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=30", "seed=0,1"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "experiments" / "run.py"), *words, *small],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "-m: 2 of 2 runs are done, in runs"
    summaries = [json.loads(p.read_text()) for p in sorted(tmp_path.glob("runs/*/summary.json"))]
    assert [(s["seed"], s["status"], s["step"]) for s in summaries] == [(0, "done", 2), (1, "done", 2)]
