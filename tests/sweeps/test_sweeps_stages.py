"""All stages of a grid in one launch: what waits for what, failures, retries, preemption."""

import json
import subprocess
from pathlib import Path

import pytest
from slurm_lab import make_run, squeue, until, write_grid

from experiments import preflight
from experiments.runtime import environment
from experiments.runtime.files import atomic_write
from sweeps import command as sweeps_command
from sweeps.jobs import slurm
from sweeps.status import status
from sweeps.store.folder import Sweep

# A stage from the weights of its parent, one that reads that, and one that reads all runs.
STAGES = [
    {"name": "tune", "of": "train", "base": {"init": "{parent}", "train.steps": 10}},
    {"name": "score", "of": "tune", "command": "score", "args": ["{parent}", "{out}"]},
    {"name": "table", "after": "tune", "command": "score", "args": ["{runs}", "{out}"]},
]


@pytest.fixture
def cli(cli, monkeypatch):
    # The weights of the stub are no model's.
    monkeypatch.setattr(preflight, "check_parent", lambda *_: None)
    cli.grid = write_grid(cli.folder, seeds=[0, 1], stages=STAGES)
    cli.stub({"sleep": 0, "weights": True})
    return cli


def rows(cli):
    """Return the status of every run by stage and seed."""
    by_cell = {}
    for row in status.statuses(cli.sweep)[0]:
        by_cell[row.run.stage, row.run.varies.get("seed")] = row
    return by_cell


def states(cli):
    return {cell: row.state for cell, row in rows(cli).items()}


CELLS = [(stage, seed) for stage in ("train", "tune", "score") for seed in "01"] + [("table", None)]
DONE = dict.fromkeys(CELLS, "done")
# Where the training of seed 1 has failed, nothing starts from it; the table is made without it.
SEED_1_FAILED = DONE | {("train", "1"): "failed", ("tune", "1"): "stopped", ("score", "1"): "stopped"}


def check_finished(cli):
    assert states(cli) == DONE
    for seed in "01":
        train, tune, score = (rows(cli)[stage, seed].run for stage in ("train", "tune", "score"))
        assert Path(tune.folder).name.startswith("dit-") and tune.folder != train.folder
        outputs = cli.sweep.path / "outputs" / score.name
        assert json.loads(outputs.read_text())[0] == tune.folder
    assert len({row.run.folder for row in rows(cli).values()}) == 5  # tables have none


def test_one_launch_runs_all_stages_and_the_next_finds_them_done(cli):
    text = cli("launch", "--dry-run")
    assert "7 runs on cluster=slurm, 5 of them after others" in text and "--array=0-1" in text
    cli("launch", "cluster=debug")
    check_finished(cli)
    text = cli("launch", "cluster=debug")
    assert "7 of 7 done" in text and "nothing to submit" in text
    assert "0 runs on cluster=slurm, 0 of them" in cli("launch", "--dry-run")
    # Longer training has other weights: everything that starts from them is made again.
    cli("launch", "cluster=debug", "train.steps=30", "seed=0")
    tunes = [row for row in status.statuses(cli.sweep)[0] if row.run.stage == "tune"]
    assert len({row.run.folder for row in tunes}) == 2
    # Also where another sweep has trained the parent.
    before, mine = rows(cli)["tune", "1"].run, cli.grid
    cli.grid = write_grid(cli.folder, "longer", seeds=[1], base={"train.steps": 30})
    cli("launch", "cluster=debug")
    cli.grid = mine
    cli("launch", "cluster=debug", "seed=1")
    after = rows(cli)["tune", "1"].run
    assert after.name == before.name and after.folder != before.folder
    assert states(cli) == DONE
    assert f"folder   {after.folder}" in cli("show", "--run", Path(after.folder).name)


def test_what_starts_from_a_failed_run_waits_for_its_retry(cli):
    cli.stub({"sleep": 0, "weights": True}, seed1={"fail": 3})
    text = cli("launch", "cluster=debug", code=1)
    assert text.count("skipped: the run that it starts from has not finished") == 2
    assert states(cli) == SEED_1_FAILED
    assert rows(cli)["tune", "1"].why == "its parent is failed"
    assert "waiting for a run that has not finished" in cli("launch", "cluster=debug")
    cli("launch", "--retry", "cluster=debug", "seed=1", code=1)
    assert states(cli) == SEED_1_FAILED
    cli.stub({"sleep": 0, "weights": True})
    cli("launch", "--retry", "cluster=debug")
    check_finished(cli)
    # The table, which was made without the failed run, is made again.
    events = cli.sweep.events(rows(cli)["table", None].run.name)
    assert [event["event"] for event in events] == ["start", "end"] * 3


def test_nothing_starts_from_a_run_that_has_diverged(cli):
    cli.stub({"sleep": 0, "weights": True}, seed1={"diverged": True})
    assert cli("launch", "cluster=debug").count("or has diverged") == 2
    diverged = {("tune", "1"): "stopped", ("score", "1"): "stopped"}
    assert states(cli) == DONE | diverged
    assert rows(cli)["train", "1"].score.startswith("diverged") and rows(cli)["tune", "1"].why == "its parent has diverged"
    assert "5 done (1 diverged)" in cli("status") and "--retry" not in cli("status", "seed=1", "--once").partition("score")[0]
    for words in (["cluster=debug"], ["cluster=debug", "--retry"]):
        assert "1 of 7 not started, since the run that it starts from has diverged" in cli("launch", *words)
    assert states(cli) == DONE | diverged


def test_a_retry_replaces_the_job_of_a_table_that_waits_for_the_other_runs(cli, answers, submissions):
    cli("launch", "cluster=slurm")
    for batch in cli.sweep.batches():
        for name, job in batch.ids.items():
            seed = cli.sweep.runs()[name].varies.get("seed")
            state = {"0": "RUNNING", "1": "FAILED", None: "PENDING"}[seed]
            (answers.history if seed == "1" else answers.queue)[job] = slurm.QueueJob(job, state, name=batch.name)
    table = rows(cli)["table", None]
    # A table of another sweep is another file.
    mine, cli.grid = cli.grid, write_grid(cli.folder, "second", seeds=[0], stages=[STAGES[2] | {"after": "train"}])
    text = cli("launch", "--dry-run")
    assert "1 of 2 queued by sweep count" in text and "1 runs on cluster=slurm" in text
    cli.grid, first = mine, len(submissions)
    text = cli("launch", "--retry", "cluster=slurm")
    assert f"{table.run.name}: job {table.job} is replaced by one that waits" in text
    assert answers.calls == [["scancel", table.job]]
    again = [(run.stage, run.varies.get("seed")) for array in submissions[first:] for run in array.runs]
    assert sorted(again, key=str) == sorted([("train", "1"), ("tune", "1"), ("score", "1"), ("table", None)], key=str)


def queue_of(cli, answers, **states):
    """Let Slurm answer that the latest jobs of the stages are in these states; it has forgotten those of others."""
    answers.queue.clear()
    answers.history.clear()
    for batch in cli.sweep.batches():
        for name, job in batch.ids.items():
            state = states.get(cli.sweep.runs()[name].stage)
            if state is not None:
                (answers.history if state == "FAILED" else answers.queue)[job] = slurm.QueueJob(job, state, name=batch.name)


def stages_of(submissions):
    return sorted(run.stage for array in submissions for run in array.runs)


def test_what_a_live_run_will_change_is_made_again_and_so_is_what_reads_that(cli, answers, submissions):
    score = {"name": "score", "of": "train", "command": "score", "args": ["{parent}", "{out}"]}
    table = {"name": "table", "after": "score", "command": "score", "args": ["{runs}", "{out}"]}
    cli.grid = write_grid(cli.folder, seeds=[0], stages=[score, table, table | {"name": "second", "after": "table"}])
    cli("launch", "cluster=debug")
    cli("launch", "cluster=slurm", "train.steps=30")
    assert stages_of(submissions) == ["score", "second", "table", "train"]
    # Somebody cancelled all but the training, which has not begun: at the step that its child has read.
    queue_of(cli, answers, train="PENDING")
    submissions.clear()
    cli("launch", "cluster=slurm", "train.steps=30")
    assert stages_of(submissions) == ["score", "second", "table"]


def test_more_steps_for_a_live_run_are_not_nothing_and_after_its_end_it_is_not_requeued(cli, answers, submissions):
    cli.grid = write_grid(cli.folder, seeds=[0])
    cli("launch", "cluster=slurm", "train.steps=20")
    queue_of(cli, answers, train="RUNNING")
    text = cli("launch", "cluster=slurm", "train.steps=30")
    assert "1 of 1 in the queue or running with 20 steps; to extend them, launch again when they are done" in text
    assert cli.sweep.runs().popitem()[1].steps == 20
    (run,) = cli.sweep.runs().values()
    queue_of(cli, answers, train="FAILED")
    batch = cli.sweep.latest_batches()[run.name].name
    cli.sweep.note(run.name, "start", batch=batch, step=0)
    cli.sweep.note(run.name, "end", how="done", step=20)
    cli("launch", "cluster=slurm", "train.steps=30")
    queue_of(cli, answers, train="PENDING")
    assert states(cli) == {("train", "0"): "pending"}
    # Pre-empted, and in the queue again.
    batch = cli.sweep.latest_batches()[run.name].name
    cli.sweep.note(run.name, "start", batch=batch, step=20)
    assert states(cli) == {("train", "0"): "requeued"}


def test_a_label_says_what_a_stage_changes(cli):
    tune = {"name": "tune", "of": "train", "base": {"init": "{parent}", "route": "none", "train.lr": 0.5}}
    cli.grid = write_grid(cli.folder, seeds=[0], base={"route": "2-8"}, axes={"train.lr": [0.1, 0.2]}, stages=[tune])
    labels = [f"tune: train.lr={lr} seed=0 (route=none train.lr=0.5)" for lr in (0.1, 0.2)]
    text = cli("launch", "cluster=debug", "--dry-run")
    assert all(f"  {label}  " in text for label in labels)
    cli("launch", "cluster=debug")
    assert all(f"  {label}  " in cli("status") for label in labels)


def test_a_retry_makes_a_table_of_tables_again_and_takes_a_child_whose_parent_is_live(cli, answers, submissions):
    table, second = (STAGES[2] | {"name": name, "after": after} for name, after in (("table", "tune"), ("second", "table")))
    cli.grid = write_grid(cli.folder, seeds=[0], stages=[STAGES[0], table, second])
    cli("launch", "cluster=slurm")
    queue_of(cli, answers, train="RUNNING", tune="FAILED", table="PENDING", second="PENDING")
    submissions.clear()
    cli("launch", "cluster=slurm", "--retry")
    assert stages_of(submissions) == ["second", "table", "tune"]


@pytest.mark.slow
def test_a_pool_starts_a_stage_when_its_parent_is_done(cli):
    cli.stub({"sleep": 0.02, "weights": True}, seed1={"fail": 15})
    cli("launch", "cluster=local", "cluster.workers=2")
    pending = rows(cli)["tune", "0"]
    assert pending.state == "pending" and pending.why == "waits for seed=0"
    assert rows(cli)["table", None].why == "waits for 2 runs"
    until(lambda: not any(row.live for row in rows(cli).values()), 120, "the end of the pool")
    assert states(cli) == SEED_1_FAILED
    cli.stub({"sleep": 0, "weights": True})
    cli("launch", "--retry", "cluster=local", "cluster.workers=2")
    until(lambda: states(cli) == DONE, 120, f"all stages, {states(cli)}")
    check_finished(cli)


@pytest.mark.slurm
def test_slurm_runs_the_stages_through_failure_preemption_and_retry(cli):
    cli.stub({"sleep": 0.05, "weights": True}, seed1={"fail": 20})
    cli("launch", "train.steps=60")
    assert rows(cli)["tune", "0"].why == "waits for seed=0"
    until(lambda: (rows(cli)["train", "0"].step or 0) > 3, 60, "a step")
    # Preempted: what waits for it goes on waiting.
    subprocess.run(["scancel", "--signal=USR2", rows(cli)["train", "0"].job], check=True)
    until(lambda: rows(cli)["train", "0"].attempts == 2, 60, "a second start")
    until(lambda: not any(row.live for row in rows(cli).values()), 120, f"the end, {squeue()}")
    assert states(cli) == SEED_1_FAILED
    cli.stub({"sleep": 0, "weights": True})
    cli("launch", "--retry", "train.steps=60")
    until(lambda: states(cli) == DONE, 120, f"all, {states(cli)} {squeue()}")
    check_finished(cli)


# --- copies of the code -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dense", "routed", "mixed"),
    [
        (["a", "a"], ["a"], []),
        (["a"], ["a", "b"], ["none used a, 2-8 used a, b"]),  # it was resumed with other code
        ([None], ["b"], []),  # of a checkout
        ([], ["b"], ["none used c, 2-8 used b"]),  # another sweep trained it: its folder has the hash
    ],
)
def test_status_names_pairs_of_two_copies_of_the_code(dense, routed, mixed, tmp_path, capsys):
    sweep = Sweep(tmp_path, "g")
    pair = [make_run(tmp_path, route, args=[f"route={route}", "seed=0"], varies={}) for route in ("none", "2-8")]
    sweep.add("", [*pair, make_run(tmp_path, "other", args=["route=2-8", "seed=1"], varies={})])
    for run, codes in zip(pair, (dense, routed), strict=True):
        for code in codes:
            sweep.note(run.name, "start", code=code)
    if not dense:
        atomic_write(tmp_path / "none" / "env.json", '{"snapshot": "c"}')
    sweep.note("other", "start", code="z")
    sweeps_command.main(["status", "g", "--json", f"paths.runs={tmp_path}"])
    assert json.loads(capsys.readouterr().out)["mixed_code"] == [f"different code in a pair: {text}" for text in mixed]


def test_a_run_records_the_hash_of_the_copy_that_it_runs_from(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    (tmp_path / "snapshot.json").write_text('{"commit": "1", "hash": "abc"}')
    assert environment.environment()["snapshot"] == "abc"
