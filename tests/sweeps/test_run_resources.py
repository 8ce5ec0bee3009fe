"""Resources of single runs: in a grid's stages and cells, in pools, shared GPUs, and after memory ran out."""

import dataclasses
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from slurm_lab import make_run, until, write_grid, yaml_grid

from experiments.runtime import run_folder
from experiments.runtime.files import atomic_write
from experiments.runtime.locks import locked
from sweeps import SweepError
from sweeps.jobs import pool_gpus, sbatch_script, sharing, slurm
from sweeps.plan import cells, resources
from sweeps.status import status
from sweeps.store.folder import JobBatch, Sweep

RUNS = Path("/runs")


def test_a_row_of_cells_changes_its_stage_and_the_scale_changes_both(tmp_path):
    chosen = yaml_grid(
        tmp_path,
        cluster={"memory_gb": 8, "cpus": 4},
        cells=[{"route": "none"}, {"route": "2-8", "cluster": {"memory_gb": 16, "gpus": 2}}],
        scales={"small": {"cluster": {"memory_gb": 32, "cpus": None}}},
        stages=[{"name": "t", "after": "train", "command": "analysis", "cluster": {"gpus": 0}}],
    )
    dense, routed, table = cells.expand(chosen)
    assert dense.cluster == {"memory_gb": 8, "cpus": 4} and table.cluster == {"gpus": 0}
    assert routed.cluster == {"memory_gb": 16, "cpus": 4, "gpus": 2}
    # It is no override of the run: neither its name nor its label has it.
    assert "cluster" not in {**routed.overrides, **routed.varies} and "cluster" not in routed.label
    dense, routed, _ = cells.expand(chosen, "small")
    assert dense.cluster == {"memory_gb": 32} and routed.cluster == {"memory_gb": 16, "gpus": 2}
    # Rows are selected as before.
    (only, _) = cells.expand(chosen, "tiny", {"route": ["2-8"]})
    assert only.cluster == routed.cluster | {"cpus": 4}


def test_a_shared_task_asks_for_one_gpu_and_for_what_all_its_runs_need():
    shared = resources.load("slurm", "tiny", {"gpus": "1", "runs_per_gpu": "3", "throttle": "7"})
    text = sbatch_script.script(Sweep(Path("/runs"), "g"), shared, 12)
    for line in ("--gpus-per-node=1", "--mem=12288M", "--cpus-per-task=6", "--array=0-3%2"):
        assert f"#SBATCH {line}\n" in text
    assert "--cpus-per-task=6" in text.partition("# command\n")[2]
    # A run without a GPU of its own, or with several, shares none.
    for gpus in (0, 2, "a100:2"):
        assert resources.for_run(dataclasses.replace(shared, fixed=[]), {"gpus": gpus}).runs_per_gpu == 1


def test_more_runs_than_an_array_may_have_tasks_are_several_arrays(cli, answers, submissions):
    answers.max_array = 2
    cli.grid = write_grid(cli.folder, seeds=[0, 1, 2, 3, 4], cluster={"gpus": 1, "runs_per_gpu": 2})
    text = cli("launch", "cluster=slurm", "cluster.memory_gb=3")
    assert [(len(array.runs), len(array.batch.tasks()), array.after) for array in submissions] == [(4, 2, ""), (1, 1, "1")]
    assert [array.resources.memory_gb for array in submissions] == [3, 3]
    assert "submitted 5 runs as job 1, 2, at most 16 at once each" in text
    assert "job 1: 4 runs in 2 tasks: 1 GPU shared by 2 runs, 3 GB" in text
    assert [row.job for row in cli.rows().values()] == ["1_0", "1_0", "1_1", "1_1", "2_0"]


def test_a_run_that_has_left_its_task_is_not_live(cli, answers, submissions):
    cli("launch", "cluster=slurm", "cluster.gpus=1", "cluster.runs_per_gpu=2")
    (batch,) = cli.sweep.batches()
    answers.queue["1_0"] = slurm.QueueJob("1_0", "PENDING", name=batch.name)
    assert cli.states() == {0: "pending", 1: "pending"}
    # Before the task starts: it will find the note.
    assert "cancelled 1 of 1" in cli("cancel", "seed=1") and answers.calls == []
    assert cli.states() == {0: "pending", 1: "stopped"} and cli.rows()[1].why == "cancelled"
    folder = cli.sweep.pools / f"{batch.name}.0"
    assert [path.name for path in folder.iterdir()] == [f"{cli.rows()[1].run.name}.cancel"]
    assert "cancelled 1 of 1" in cli("cancel", "seed=0") and answers.calls == [["scancel", "1_0"]]
    answers.queue["1_0"] = slurm.QueueJob("1_0", "RUNNING", name=batch.name)
    run = cli.rows()[0].run.name
    for state in ("damaged", json.dumps({"runs": {run: "RUNNING"}})):
        (folder / "state.json").write_text(state)
        assert cli.rows()[0].live
    (folder / "state.json").write_text(json.dumps({"runs": {run: "ENDED"}}))
    assert not cli.rows()[0].live


def test_a_task_that_starts_again_leaves_out_what_had_ended(tmp_path):
    folder = tmp_path / "runs" / ".sweeps" / "g" / "pools" / "b.0"
    folder.mkdir(parents=True)
    jobs = {name: f"{name}.json" for name in "abc"}
    places = {"root": str(tmp_path / "runs"), "sweep": "g", "logs": str(tmp_path)}
    files = tmp_path / "b.0"
    atomic_write(files / "pool.json", json.dumps({"jobs": jobs, "workers": 3, **places}))
    (folder / "state.json").write_text(json.dumps({"runs": {"a": "ENDED", "b": "RUNNING", "c": "PENDING"}}))
    pool = sharing.TaskPool(files, signal_s=60)
    assert pool.queue == ["b", "c"] and pool.ended == {"a"} and pool.sweep.name == "g"
    # A run that a signal ended before it could save starts again, if the whole task was told to stop.
    for code, stopping, again in ((75, False, True), (-12, False, False), (-12, True, True), (1, True, False)):
        pool.request = signal.SIGUSR2 if stopping else None
        assert pool.wants_requeue(code) is again


def test_a_run_that_hears_no_signal_does_not_keep_its_task_from_the_requeue(tmp_path, monkeypatch):
    """A stuck process, which Slurm ends with the requeue."""
    run, left = make_run(RUNS, "a"), []
    resources_of_two = {"runs_per_gpu": 2, "signal_s": 5}
    batch = JobBatch("b", "slurm", "slurm", ["a"], 1.0, "", resources_of_two, launch="l")
    sweep = Sweep(tmp_path / "runs", "g")
    job = sharing.SharedJob.create(sweep, [run], batch)
    stuck = SimpleNamespace(poll=lambda: None, send_signal=left.append)

    def start(pool, *_):
        pool._stop(signal.SIGUSR2, None)
        pool._requested_at -= 4
        return stuck

    monkeypatch.setattr(sharing.TaskPool, "_start", start)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sharing, "requeue", lambda *words: left.append(words) or True)
    monkeypatch.setattr(sharing, "wait_for_end", lambda _: left.append("waits"))
    monkeypatch.setattr(sharing, "expect_term", lambda: None)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(sharing, "check_code", lambda _: None)
    job()
    assert left == [signal.SIGUSR2, ("7", sweep.launches / "l"), "waits"]
    assert run_folder.read(sweep.pools / "b.0" / "state.json")["runs"] == {"a": "RUNNING"}


def test_a_run_takes_the_emptiest_gpus_of_a_pool():
    slots = pool_gpus.GpuSlots(["3", "5"])
    assert slots.choose(0, 1) == [] and slots.choose(3, 1) is None
    for expected in ("3", "5", "3"):
        assert slots.choose(1, 2) == [expected]
        slots.take([expected], 2)
    assert slots.choose(1, 1) is None and slots.choose(2, 2) is None and slots.choose(1, 2) == ["5"]
    slots.release(["5"], 2)
    assert slots.choose(1, 1) == ["5"]


def test_a_pool_has_workers_for_each_gpu_and_needs_gpus_for_all_unless_runs_differ(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    for typed, workers in (({}, 6), ({"workers": "4"}, 4), ({"throttle": "5"}, 5)):
        loaded = resources.load("local", "tiny", {"gpus": "1", "runs_per_gpu": "3", **typed})
        assert loaded.workers == workers
    sweep = Sweep(tmp_path, "g")
    one = resources.load("local", "tiny", {"gpus": "1"})
    two, shared = dataclasses.replace(one, gpus=2), dataclasses.replace(one, runs_per_gpu=2)
    assert pool_gpus.choose_gpus(sweep, 1, [one, one]) == ["3"]
    assert pool_gpus.choose_gpus(sweep, 3, [shared]) == ["3", "5"]
    assert pool_gpus.choose_gpus(sweep, 3, [one, two]) == ["3", "5"]  # they wait for each other
    message = "cluster.workers=5 with cluster.gpus=1 and cluster.runs_per_gpu=2 needs 3 GPUs, 2 are visible"
    with pytest.raises(SweepError, match=f"{message}; try cluster.workers=4"):
        pool_gpus.choose_gpus(sweep, 5, [shared])
    with pytest.raises(SweepError, match="cluster.gpus=3 needs 3 GPUs, 2 are visible"):
        pool_gpus.choose_gpus(sweep, 1, [one, dataclasses.replace(one, gpus=3)])
    # Those of another live pool of the sweep come last.
    atomic_write(sweep.pools / "b" / "state.json", json.dumps({"runs": {}, "gpus": ["3"]}))
    assert pool_gpus.choose_gpus(sweep, 1, [one]) == ["3"]
    with locked(sweep.pools / "b"):
        assert pool_gpus.choose_gpus(sweep, 1, [one]) == ["5"]


@pytest.mark.slow
def test_a_pool_gives_a_run_the_gpus_of_its_cell_and_says_what_it_ignores(cli, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cli.grid = write_grid(
        cli.folder, seeds=[0],
        cells=[{"route": "none", "cluster": {"gpus": 1}},
               {"route": "2-8", "cluster": {"gpus": 2, "memory_gb": 80, "tasks": 2}}],
    )  # fmt: skip
    text = cli("launch", "cluster=local", "cluster.workers=2")
    assert "cluster=local ignores memory_gb=80, tasks=2 of the grid" in text
    until(lambda: all(row.state == "done" for row in status.statuses(cli.sweep)[0]), what="both")
    gpus = {}
    for row in status.statuses(cli.sweep)[0]:
        summary = run_folder.read(Path(row.run.folder) / "summary.json")
        gpus[row.run.varies["route"]] = summary["gpus"]
        # The two workers share the cores.
        assert summary["threads"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert gpus["2-8"] == "3,5" and gpus["none"] in ("3", "5")
