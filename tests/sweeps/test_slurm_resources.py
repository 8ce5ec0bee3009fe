"""Resources of single runs on a real Slurm cluster (marker `slurm`): arrays, shared GPUs, memory."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from slurm_lab import on_cluster, require_slurm, squeue, started, until, write_grid

from sweeps.status import status

pytestmark = pytest.mark.slurm


def granted(*jobs):
    """Return what Slurm gave each job: memory of a node in MB, GPUs, limit in minutes."""
    rows = squeue(columns="%i|%m|%b|%l")
    return [rows[job] for job in jobs]


def summary(row):
    return json.loads((Path(row.run.folder) / "summary.json").read_text())


def test_arrays_are_split_by_the_resources_of_cells_and_stages(cli):
    cli.grid = write_grid(
        cli.folder, base={"train.steps": 5}, seeds=[0],
        cells=[{"route": "none"}, {"route": "2-8", "cluster": {"memory_gb": 0.75, "gpus": 1}}],
        stages=[{"name": "table", "after": "train", "command": "score", "args": ["{runs}", "{out}"],
                 "cluster": {"memory_gb": 0.25, "time": "0:10:00"}}],
    )  # fmt: skip
    text = cli("launch", "--throttle", "3", "cluster.memory_gb=0.5", "--dry-run")
    assert "array 1: 1 run: no GPU, 0.5 GB, 1 CPU, 1:00:00; at most 3 at once" in text
    # What is typed is more than what the grid says.
    assert "array 2: 1 run: 1 GPU, 0.5 GB" in text
    text = cli("launch", "--throttle", "3")
    assert text.count("  job ") == 3 and "1 GPU, 0.75 GB, 1 CPU, 1:00:00; at most 3 at once" in text
    rows = {}
    for row in status.statuses(cli.sweep)[0]:
        rows[row.run.varies.get("route", row.run.stage), row.run.varies.get("seed")] = row
    arrays = {row.job.partition("_")[0] for row in rows.values()}
    assert len(arrays) == 3
    default = granted(rows["none", "0"].job)[0][0]
    assert granted(*(rows[cell].job for cell in [("2-8", "0"), ("table", None)])) == [
        ("768M", "gres:gpu:1", "1:00:00"),
        ("256M", "N/A", "10:00"),
    ]
    assert default != "768M" and granted(rows["none", "0"].job)[0][1] == "N/A"
    until(lambda: all(row.state == "done" for row in status.statuses(cli.sweep)[0]), 90, "all")
    assert summary(rows["2-8", "0"])["gpus"] in ("0", "1") and summary(rows["none", "0"])["gpus"] is None
    assert "gets     1 GPU, 0.75 GB" in cli("show", "--run", rows["2-8", "0"].run.name)
    values = json.loads(cli("status", "--json"))["runs"]
    assert {value["resources"].partition(", ")[0] for value in values} == {"no GPU", "1 GPU"}


def test_runs_that_share_a_gpu_are_processes_of_one_task_and_end_one_by_one(cli):
    cli.stub({"sleep": 0.1, "save_every": 5}, seed1={"fail": 10})
    shared = ["cluster.gpus=1", "cluster.runs_per_gpu=2", "cluster.memory_gb=0.25", "train.steps=300"]
    cli("launch", *shared)
    rows = cli.rows()
    assert rows[0].job == rows[1].job != rows[2].job == rows[3].job
    # Each of the two gets what it asks for.
    assert granted(rows[0].job)[0][:2] == ("512M", "gres:gpu:1")
    # One of a task fails, one is killed, one is cancelled: the others go on.
    cli.running(2, step=3), cli.running(3, step=3)
    assert "cancelled 1 of 1" in cli("cancel", "seed=3")
    until(lambda: cli.states()[3] == "stopped" and cli.states()[1] == "failed", what=f"ends, {cli.rows()}")
    assert {squeue()[rows[seed].job][0] for seed in (1, 3)} == {"RUNNING"}
    assert "not a number at step 10" in cli.rows()[1].why
    assert "Traceback" in cli.log(1) and "Traceback" not in cli.log(0)
    os.kill(cli.starts(2)[0]["pid"], signal.SIGKILL)
    until(lambda: cli.states()[2] == "failed", what="a killed run")
    assert cli.rows()[2].why.startswith("killed by signal 9")
    # What has failed can be submitted again at once.
    cli.running(0, step=5)
    cli.stub({"sleep": 0.02})
    cli("launch", "--retry", "seed=1,2,3", "cluster.gpus=1", "cluster.runs_per_gpu=3", "train.steps=300")
    assert cli.rows()[1].job == cli.rows()[2].job == cli.rows()[3].job != rows[0].job
    cli.done(0, 1, 2, 3)
    gpus = {seed: (row.node, summary(row)["gpus"]) for seed, row in cli.rows().items()}
    assert gpus[0][1] in ("0", "1") and gpus[1] == gpus[2] == gpus[3]
    until(lambda: squeue()[rows[0].job][0] == "FAILED", what="the task to fail in Slurm as well")
    assert [len(cli.starts(seed)) for seed in range(4)] == [1, 2, 2, 2]
    # All runs of a task: it is Slurm that ends it.
    cli("launch", *shared[:-1], "seed=7,8", "train.steps=5000")
    cli.running(7, step=3)
    assert "cancelled 2 of 2" in cli("cancel", "seed=7,8")
    until(lambda: {cli.states()[7], cli.states()[8]} == {"stopped"}, what="the end")
    assert squeue()[cli.rows()[7].job][0] in ("CANCELLED", "COMPLETING")


def _ends(cli, seed):
    return [event["how"] for event in cli.events(seed) if event["event"] == "end"]


def test_usr2_reaches_all_runs_of_a_task_and_those_that_have_not_ended_go_on(cli):
    cli.stub({"sleep": 0.1, "save_every": 1000}, seed1={"fail": 3})
    cli("launch", "cluster.gpus=1", "cluster.runs_per_gpu=3", "train.steps=150", "seed=0,1,2")
    cli.running(0, step=5)
    job = cli.running(2, step=5).job
    until(lambda: cli.states()[1] == "failed", what="a failed run")
    subprocess.run(["scancel", "--signal=USR2", job], check=True)
    until(lambda: len(cli.starts(2)) == 2, what=f"a second start, {cli.events(2)} {squeue()}")
    cli.done(0, 2)
    for seed in (0, 2):
        first, second = cli.starts(seed)
        assert second["job"] == first["job"] == job and second["restart"] == 1
        assert second["step"] >= 5
        # A run is done once its summary is there; it notes its end a moment later.
        until(lambda seed=seed: _ends(cli, seed) == ["requeued", "done"], what=f"two ends of {seed}")
    assert len(cli.starts(1)) == 1 and cli.states()[1] == "failed"


# --- memory -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def strict_lab():
    """A cluster that ends steps that outgrow their memory."""
    require_slurm()
    yield from started(OOM_KILL="1", ETC_HOSTS="0")


@pytest.fixture
def strict_cli(strict_lab, stubs, tmp_path, capsys, monkeypatch):
    yield from on_cluster(strict_lab, tmp_path, capsys, monkeypatch)


def test_a_run_whose_memory_ran_out_gets_more_where_it_is_typed(strict_cli):
    strict_cli.resources(memory_gb=0.4)
    strict_cli.stub({"sleep": 0.05}, seed0={"memory_mb": 1000}, seed1={"fail": 3})
    strict_cli("launch", "seed=0,1", "train.steps=100")
    until(lambda: set(strict_cli.states().values()) == {"failed"}, what=f"{strict_cli.rows()}")
    row = strict_cli.rows()[0]
    assert row.why.startswith("out of memory"), row
    assert not strict_cli.rows()[1].why.startswith("out of memory")
    strict_cli.stub({"sleep": 0.02}, seed0={"memory_mb": 1000})
    strict_cli("launch", "--retry", "seed=0,1", "train.steps=100", "cluster.memory_gb=1.5")
    assert granted(strict_cli.rows()[0].job)[0][0] == "1.50G"
    until(lambda: set(strict_cli.states().values()) == {"done"}, what=f"{strict_cli.rows()}")
