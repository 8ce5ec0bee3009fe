"""The real training on a real Slurm cluster (marker `slurm`): interrupted runs end as undisturbed ones do."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.numpy import load_file
from slurm_lab import squeue, until

from sweeps import command as sweeps_command
from sweeps.jobs import slurm
from sweeps.status import status
from sweeps.store.folder import Sweep

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slurm
SMALL = [
    "backbone.depth=3", "route=0-1", "train.steps=40", "train.batch=8", "train.log_every=1", "train.save_every=1000",
    "train.sample_every=0", "sampler.steps=2", "guidance=none", "eval=none",
]  # fmt: skip


class OneRunSweep:
    """One sweep of one real run below `folder`."""

    def __init__(self, folder, **resources):
        folder.mkdir()
        self.folder = folder
        self.grid = folder / "one.yaml"
        self.grid.write_text(yaml.safe_dump({"title": "One run", "base": {"backbone": "dit"}, "makes": []}))
        self.place = folder / "lab.yaml"
        self.place.write_text(yaml.safe_dump({"kind": "slurm", "time": "1:00:00", "signal_s": 120, **resources}))
        self.sweep = Sweep(folder / "runs", "one")

    def launch(self, *words):
        words = [f"cluster={self.place}", f"paths.runs={self.folder / 'runs'}", *SMALL, *words]
        assert sweeps_command.main(["launch", str(self.grid), *words]) == 0

    @property
    def row(self):
        return status.statuses(self.sweep)[0][0]

    def starts(self):
        return [e for e in self.sweep.events(self.row.run.name) if e["event"] == "start"]

    def interrupt(self, step):
        until(lambda: self.row.state == "running" and (self.row.step or 0) >= step, 240, f"step {step}, {self.row}")
        subprocess.run(["scancel", "--signal=USR2", self.row.job], check=True)
        until(lambda: len(self.starts()) == 2, 240, f"a second start, {self.row}")

    def done(self):
        until(lambda: self.row.state in ("done", "failed"), 300, f"its end, {self.row}")
        assert self.row.state == "done", self.row.why
        return Path(self.row.run.folder)


@pytest.fixture(autouse=True)
def slurm_lab(lab, monkeypatch):
    for key, value in lab.environment().items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    live = [i for i, s in squeue().items() if slurm.QueueJob(i, s[0]).live]
    subprocess.run(["scancel", *live], check=False)
    until(lambda: not any(slurm.QueueJob(i, s[0]).live for i, s in squeue().items()), what="an empty queue")


def learnt(folder):
    """What a run learnt and noted, clock times apart."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: line[k] for k in ("step", "loss", "lr", "grad_norm")} for line in lines]
    # The file's head names the folder of runs, which differs.
    weights = {k: v.tobytes() for k, v in load_file(folder / "model.safetensors").items()}
    return weights, kept


def test_a_pre_empted_run_ends_bitwise_as_an_undisturbed_one(tmp_path):
    calm, shaken = OneRunSweep(tmp_path / "calm"), OneRunSweep(tmp_path / "shaken")
    calm.launch()
    shaken.launch()
    shaken.interrupt(step=4)
    assert shaken.starts()[1]["step"] >= 4 and shaken.starts()[1]["restart"] == 1
    ours, theirs = learnt(shaken.done()), learnt(calm.done())
    assert [line["step"] for line in ours[1]] == list(range(1, 41))
    assert ours[1] == theirs[1] and ours[0].keys() == theirs[0].keys()
    assert [k for k in ours[0] if ours[0][k] != theirs[0][k]] == []
    assert len(calm.starts()) == 1


@pytest.mark.usefixtures("named_nodes")
def test_four_ranks_on_two_nodes_agree_save_and_go_on(tmp_path):
    one = OneRunSweep(tmp_path / "one", nodes=2, tasks=2)
    one.launch()
    one.interrupt(step=3)
    folder = one.done()
    assert one.starts()[1]["step"] >= 3
    log = "".join(p.read_text() for p in one.sweep.logs.glob("*_0_log.out"))
    assert "4 x cpu" in log and "(resumed at step" in log
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 41))


def test_hydras_own_launcher_works_within_its_limits(tmp_path, monkeypatch):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    # It pickles by reference and knows no snapshot: the packages must be importable on the node.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = ["-m", "hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=30", "seed=0,1"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "experiments" / "run.py"), *words, *SMALL, "train.steps=2"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "-m: 2 of 2 runs are done, in runs"
    summaries = [json.loads(p.read_text()) for p in sorted(tmp_path.glob("runs/*/summary.json"))]
    assert [(s["seed"], s["status"], s["step"]) for s in summaries] == [(0, "done", 2), (1, "done", 2)]
