"""All stages of a grid in one launch: what waits for what, failures, retries, preemption."""

import json
import subprocess
from pathlib import Path

import pytest
import submitit
from slurm_lab import STUB, Launcher, lab, squeue, until, use_stubs, write_grid  # noqa: F401

from experiments import preflight
from sweeps import command as sweeps_command
from sweeps.jobs import sbatch, slurm
from sweeps.status import status, status_table
from sweeps.store.folder import Sweep
from sweeps.store.planned_run import PlannedRun

# A stage from the weights of its parent, one that reads that, and one that reads all runs.
STAGES = [
    {"name": "tune", "of": "train", "base": {"init": "{parent}", "train.steps": 10}},
    {"name": "score", "of": "tune", "command": "score", "args": ["{parent}", "{out}"]},
    {"name": "table", "after": "tune", "command": "score", "args": ["{runs}", "{out}"]},
]


@pytest.fixture(autouse=True)
def stubs(monkeypatch):
    monkeypatch.syspath_prepend(str(STUB))
    use_stubs(monkeypatch)


@pytest.fixture
def shop(tmp_path, capsys, monkeypatch):
    # The weights of the stub are no model's.
    monkeypatch.setattr(preflight, "check_parent", lambda *_: None)
    launcher = Launcher(tmp_path, capsys)
    launcher.grid = write_grid(tmp_path, seeds=[0, 1], stages=STAGES)
    launcher.stub({"sleep": 0, "weights": True})
    return launcher


def rows(shop):
    """Return the status of every run by stage and seed."""
    by_cell = {}
    for row in status.statuses(shop.sweep)[0]:
        by_cell[row.run.stage, row.run.varies.get("seed")] = row
    return by_cell


def states(shop):
    return {cell: row.state for cell, row in rows(shop).items()}


CELLS = [(stage, seed) for stage in ("train", "tune", "score") for seed in "01"] + [("table", None)]


def check_finished(shop):
    assert states(shop) == dict.fromkeys(CELLS, "done")
    for seed in "01":
        train, tune, score = (rows(shop)[stage, seed].run for stage in ("train", "tune", "score"))
        assert Path(tune.folder).name.startswith("dit-") and tune.folder != train.folder
        outputs = shop.sweep.path / "outputs" / score.name
        assert json.loads(outputs.read_text())[0] == tune.folder
    assert len({row.run.folder for row in rows(shop).values()}) == 5  # tables have none


def test_one_launch_runs_all_stages_and_the_next_finds_them_done(shop):
    text = shop("launch", "--dry-run")
    assert "7 runs on cluster=slurm, 5 of them after others" in text and "--array=0-1" in text
    shop("launch", "cluster=debug")
    check_finished(shop)
    text = shop("launch", "cluster=debug")
    assert "7 of 7 done" in text and "nothing to submit" in text
    assert "0 runs on cluster=slurm, 0 of them" in shop("launch", "--dry-run")
    # Longer training has other weights: everything that starts from them is made again.
    shop("launch", "cluster=debug", "train.steps=30", "seed=0")
    tunes = [row for row in status.statuses(shop.sweep)[0] if row.run.stage == "tune"]
    assert len({row.run.folder for row in tunes}) == 2


def test_what_starts_from_a_failed_run_waits_for_its_retry(shop):
    shop.stub({"sleep": 0, "weights": True}, seed1={"fail": 3})
    text = shop("launch", "cluster=debug", code=1)
    assert text.count("skipped: the run that it starts from has not finished") == 2
    expected = dict.fromkeys(CELLS, "done") | {("train", "1"): "failed"}
    expected |= {("tune", "1"): "stopped", ("score", "1"): "stopped"}
    assert states(shop) == expected
    assert rows(shop)["tune", "1"].why == "its parent is failed"
    assert "waiting for a run that has not finished" in shop("launch", "cluster=debug")
    shop.stub({"sleep": 0, "weights": True})
    shop("retry", "cluster=debug")
    check_finished(shop)


@pytest.mark.slow
def test_a_pool_starts_a_stage_when_its_parent_is_done(shop):
    shop.stub({"sleep": 0.02, "weights": True}, seed1={"fail": 15})
    shop("launch", "cluster=local", "cluster.workers=2")
    pending = rows(shop)["tune", "0"]
    assert pending.state == "pending" and pending.why == "waits for seed=0"
    assert rows(shop)["table", None].why == "waits for 2 runs"
    until(lambda: not any(row.live for row in rows(shop).values()), 120, "the end of the pool")
    assert rows(shop)["train", "1"].state == "failed"
    assert rows(shop)["score", "0"].state == rows(shop)["table", None].state == "done"
    assert rows(shop)["score", "1"].state == "stopped"
    shop.stub({"sleep": 0, "weights": True})
    shop("retry", "cluster=local", "cluster.workers=2")
    until(lambda: set(states(shop).values()) == {"done"}, 120, f"all stages, {states(shop)}")
    check_finished(shop)


def test_tasks_of_one_array_get_their_dependencies_while_it_is_held(shop, monkeypatch):
    calls, scripts = [], []
    monkeypatch.setattr(slurm, "call", lambda words: calls.append(words) or "")
    monkeypatch.setattr(slurm, "max_array", lambda *_: 1001)
    ids = iter("789")

    def submit_command(self, command):
        script = self._make_submission_file_text(command, "uid")
        scripts.append(script)
        return submitit.slurm.slurm.SlurmJob(self.folder, next(ids), tasks=[0])

    monkeypatch.setattr(sbatch.Executor, "_submit_command", submit_command)
    monkeypatch.setattr(submitit.slurm.slurm.SlurmExecutor, "affinity", classmethod(lambda _: 2))
    shop("launch", "cluster=slurm")
    assert len(scripts) == 3
    assert "--hold" not in scripts[0] and "dependency" not in scripts[0]
    for script in scripts[1:]:
        assert "#SBATCH --hold\n" in script and "#SBATCH --kill-on-invalid-dep=yes" in script
    updates = [words for words in calls if words[0] == "scontrol"]
    assert updates[:3] == [
        ["scontrol", "update", "JobId=8_0", "Dependency=afterok:7_0"],
        ["scontrol", "update", "JobId=8_1", "Dependency=afterok:7_1"],
        ["scontrol", "release", "8"],
    ]
    assert ["scontrol", "update", "JobId=9_2", "Dependency=afterany:8"] in updates


@pytest.mark.slurm
def test_slurm_runs_the_stages_through_failure_preemption_and_retry(shop, lab, monkeypatch):  # noqa: F811
    for key, value in lab.environment().items():
        monkeypatch.setenv(key, value)
    shop.stub({"sleep": 0.05, "weights": True}, seed1={"fail": 20})
    shop("launch", "cluster=slurm", "cluster.time=1:00:00", "cluster.signal_s=60", "train.steps=60")
    assert rows(shop)["tune", "0"].why == "waits for seed=0"
    until(lambda: (rows(shop)["train", "0"].step or 0) > 3, 60, "a step")
    # Preempted: what waits for it goes on waiting.
    subprocess.run(["scancel", "--signal=USR2", rows(shop)["train", "0"].job], check=True)
    until(lambda: rows(shop)["train", "0"].attempts == 2, 60, "a second start")
    until(lambda: not any(row.live for row in rows(shop).values()), 120, f"the end, {squeue()}")
    expected = dict.fromkeys(CELLS, "done") | {("train", "1"): "failed"}
    expected |= {("tune", "1"): "stopped", ("score", "1"): "stopped"}
    assert states(shop) == expected
    shop.stub({"sleep": 0, "weights": True})
    shop("retry")
    until(lambda: set(states(shop).values()) == {"done"}, 120, f"all, {states(shop)} {squeue()}")
    check_finished(shop)


# --- copies of the code -----------------------------------------------------------------------------------------


def pair_of_runs(tmp_path, dense_code, routed_code):
    sweep, runs = Sweep(tmp_path, "g"), []
    for route, codes in (("none", dense_code), ("2-8", routed_code)):
        for seed in ("0", "1"):
            args = [f"route={route}", f"seed={seed}", "train.steps=5"]
            run = PlannedRun(f"{route}-{seed}", "train", "", "e:m", args, True, str(tmp_path / route), 5)
            runs.append(run)
            for code in codes if seed == "0" else ["a"]:
                sweep.note(run.name, "start", code=code)
    sweep.add("", runs)
    return sweep, runs


@pytest.mark.parametrize(
    ("dense", "routed", "mixed"),
    [
        (["a"], ["a"], []),
        (["a", "a"], ["a"], []),
        (["a"], ["b"], ["none-0 used a, 2-8-0 used b"]),
        (["a"], ["a", "b"], ["none-0 used a, 2-8-0 used a, b"]),  # it was resumed with other code
        ([None], ["b"], []),  # of a checkout
    ],
)
def test_status_names_pairs_of_two_copies_of_the_code(dense, routed, mixed, tmp_path, capsys):
    sweep, runs = pair_of_runs(tmp_path, dense, routed)
    assert status_table.mixed_pairs(sweep, runs) == [f"different code in a pair: {text}" for text in mixed]
    sweeps_command.main(["status", "g", "--once", f"paths.runs={tmp_path}"])
    assert capsys.readouterr().out.count("different code in a pair") == len(mixed)
    sweeps_command.main(["status", "g", "--json", f"paths.runs={tmp_path}"])
    assert len(json.loads(capsys.readouterr().out)["mixed_code"]) == len(mixed)


def test_the_hash_of_the_code_is_read_from_the_run_where_another_sweep_trained_it(tmp_path):
    sweep, runs = pair_of_runs(tmp_path, [], ["b"])
    assert status_table.mixed_pairs(sweep, runs) == []
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "env.json").write_text('{"snapshot": "c"}')
    assert "none-0 used c, 2-8-0 used b" in status_table.mixed_pairs(sweep, runs)[0]
    # Another sweep went on with it, with newer code.
    sweep.note("none-0", "start", code="b")
    assert "none-0 used b, c, 2-8-0 used b" in status_table.mixed_pairs(sweep, runs)[0]


def test_a_run_records_the_hash_of_the_copy_that_it_runs_from(tmp_path, monkeypatch):
    from experiments.runtime import environment

    assert environment.environment()["snapshot"] is None
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    (tmp_path / "snapshot.json").write_text('{"commit": "1", "hash": "abc"}')
    assert environment.environment()["snapshot"] == "abc"
