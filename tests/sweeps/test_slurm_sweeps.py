"""Sweeps on a real Slurm cluster (marker `slurm`): what is submitted, interrupted, killed and taken up again."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from slurm_lab import squeue, until

pytestmark = pytest.mark.slurm


def signal_job(name, job):
    subprocess.run(["scancel", f"--signal={name}", job], check=True)


def test_an_array_runs_the_snapshot_throttled_and_status_agrees_with_squeue(cli):
    setup = ["export SAID='a: b'", 'echo "on $SLURMD_NODENAME $SAID"']
    cli.resources(gpus="a100:1", setup=setup)
    text = cli("launch", "cluster.partition=nowhere", code=2)
    assert text.startswith("error: sbatch refused:") and "partition" in text
    assert not cli.sweep.runs() and cli.sweep.batches() == []
    cli.stub({"sleep": 0.05})
    words = ["seed=0,1,2", "--throttle", "2"]
    assert "submitted 3 runs as job" in cli("launch", *words)
    assert "3 of 3 in the queue or running" in cli("launch", *words)
    seen = set()
    while True:
        before, rows, after = squeue(), cli.rows(), squeue()
        if before == after:
            for row in rows.values():
                said = before[row.job][0] if row.job else None
                expected = {"RUNNING": {"starting", "running", "done"}, "PENDING": {"pending"}}
                assert row.state in expected.get(said, {"done", "starting", "running"}), (row, said)
                seen.add(row.state)
        mine = {row.job for row in rows.values()}
        assert sum(s[0] == "RUNNING" for i, s in after.items() if i in mine) <= 2
        if all(row.state == "done" for row in rows.values()):
            break
    assert {"pending", "running", "done"} <= seen
    text = cli("launch", "seed=0,1,2")
    assert "3 of 3 done" in text and "nothing to submit" in text
    lines = cli("status").splitlines()
    assert lines[-1] == "3 done" and lines[0].startswith("done      dit-T4-mnist_none_s0-")
    assert [len(cli.starts(seed)) for seed in range(3)] == [1, 1, 1]
    # What was asked for, and which code ran.
    (batch,) = cli.sweep.batches()
    (script,) = cli.sweep.launches.glob("*/*_submission.sh")
    assert script.read_text().count("#SBATCH --gpus-per-node=a100:1\n") == 1
    assert "a: b" in cli.log(0, "out")
    assert batch.launch in script.read_text() and cli.starts(0)[0]["code"] == batch.code
    # A cluster file runs code, which is not taken from a folder of runs.
    cli.place = []
    assert "was on Slurm; type its cluster= again" in cli("launch", "--retry", "seed=0,1,2", code=2)


def test_runs_of_one_array_fail_are_stopped_and_are_requeued_each_by_itself(cli):
    cli.resources(signal_s=10)
    slow = {"sleep": 0.1, "save_every": 1000}
    cli.stub(slow, seed0={**slow, "deaf": True, "save_every": 5}, seed1={"fail": 7})
    cli("launch", "train.steps=600")
    jobs = {seed: cli.running(seed, step=12).job for seed in (0, 2, 3)}
    # The last task is the one whose raw id is the array's own: it must not requeue the others.
    for seed, name in ((0, "USR2"), (2, "TERM"), (3, "USR2")):
        signal_job(name, jobs[seed])
    # A failure is one in Slurm as well, and its traceback is in the log.
    row = until(lambda: cli.rows()[1] if cli.states()[1] == "failed" else None, what="a failed run")
    until(lambda: squeue()[row.job][0] == "FAILED", what="FAILED in squeue")
    assert "the loss is not a number at step 7" in row.why and "stub_training.py:" in row.why
    assert "Traceback (most recent call last)" in cli.log(1)
    cli.stub({"sleep": 0})  # for second starts
    line = next(x for x in cli("status").splitlines() if x.startswith("failed"))
    assert "RuntimeError: the loss is not a number at step 7" in line
    # TERM saves, and waits for what Slurm decides: a pre-emption without a warning signal ends like this.
    until(lambda: cli.events(2)[-1].get("how") == "stopped", what="a stop")
    assert squeue()[jobs[2]][0] == "RUNNING"
    subprocess.run(["scontrol", "requeue", jobs[2]], check=True)
    # USR2 saves and requeues the same job, also where the run does not hear it.
    for seed in (0, 2, 3):
        until(lambda n=seed: len(cli.starts(n)) == 2, what=f"a second start of {seed}, {cli.events(seed)}")
        first, second = cli.starts(seed)
        assert second["job"] == first["job"] == jobs[seed] and second["restart"] == 1
        assert second["step"] >= 10
    ends = {seed: next(e for e in cli.events(seed) if e["event"] == "end") for seed in (0, 3)}
    assert "not answered in time" in ends[0]["signal"]
    assert ends[3]["how"] == "requeued" and ends[3]["signal"] == "SIGUSR2"
    assert cli.starts(3)[1]["step"] == ends[3]["step"]
    assert "1 of 4 failed" in cli("launch", "train.steps=600") and len(cli.sweep.batches()) == 1
    cli("launch", "--retry", "train.steps=600")
    cli.done(0, 1, 2, 3)
    assert len(cli.starts(1)) == 2


def test_a_killed_run_is_failed_and_one_without_progress_is_given_up_until_a_retry(cli):
    words = ["seed=0,1", "train.steps=600"]
    cli.stub({"sleep": 0.05, "save_every": 5}, seed0={"sleep": 0.05, "stuck": True})
    cli("launch", *words)
    row = cli.running(1, step=12)
    os.kill(cli.starts(1)[0]["pid"], signal.SIGKILL)
    for attempt in (1, 2, 3):
        until(lambda n=attempt: len(cli.starts(0)) == n, what=f"attempt {attempt}, {cli.rows()[0]}")
        # Not before its handlers are there: a starting process dies of the signal or loses it.
        signal_job("USR2", cli.running(0, step=1).job)
    until(lambda: cli.states() == {0: "failed", 1: "failed"}, what=f"failed runs, {cli.rows()}")
    assert "given up: 3 attempts started at step 0" in cli.rows()[0].why
    killed = cli.rows()[1]
    assert killed.why == f"killed by signal 9 (out of memory?), saved step {killed.step}"
    assert killed.step >= 10
    until(lambda: {squeue()[r.job][0] for r in (row, cli.rows()[0])} == {"FAILED"}, what="FAILED in squeue")
    assert "2 of 2 failed; add --retry" in cli("launch", *words)
    cli.stub({"sleep": 0})
    cli("launch", "--retry", *words)
    cli.done(0, 1)
    assert cli.starts(1)[1]["step"] >= 10
    assert "nothing has failed" in cli("launch", "--retry", *words)


def test_a_cut_off_submission_is_found_a_held_job_released_and_all_cancelled(cli):
    cli.stub({"sleep": 0.05, "save_every": 5})
    words = ["seed=0,1", "--throttle", "1", "train.steps=2000"]
    cli("launch", *words)
    file = cli.sweep.path / "batches.jsonl"
    intent, ids = file.read_text().splitlines()
    file.write_text(intent + "\n")
    assert "2 of 2 in the queue or running" in cli("launch", *words)
    assert cli.sweep.batches()[0].ids == json.loads(ids)["ids"]
    job = cli.rows()[1].job
    subprocess.run(["scontrol", "hold", job], check=True)
    why = until(lambda: cli.rows()[1].held and cli.rows()[1].why, what="a held job")
    assert why.startswith("held (JobHeld") and why.endswith(f": scontrol release {job}")
    subprocess.run(why.partition(": ")[2].split(), check=True)
    until(lambda: not cli.rows()[1].held, what="a released job")
    cli.running(0, step=6)
    assert "cancelled 2 of 2" in cli("cancel")
    until(lambda: set(cli.states().values()) == {"stopped"}, what=f"stopped runs, {cli.rows()}")
    cli.stub({"sleep": 0})
    assert "submitted 2 runs" in cli("launch", "seed=0,1", "train.steps=100")
    cli.done(0, 1)
    assert cli.starts(0)[1]["step"] >= 5


def test_a_higher_partition_preempts_and_runs_alone_or_in_a_shared_task_resume(cli):
    cli.resources(partition="low", cpus=1)
    cli.stub({"sleep": 0.1, "save_every": 1000})
    cli("launch", "seed=0,1", "train.steps=80")
    cli("launch", "seed=2,3", "train.steps=80", "cluster.gpus=1", "cluster.runs_per_gpu=2")
    for seed in range(4):
        cli.running(seed, step=3)
    assert cli.rows()[2].job == cli.rows()[3].job
    urgent = ["sbatch", "--parsable", "-p", "high", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 4"]
    high = subprocess.run(urgent, capture_output=True, text=True, check=True).stdout.strip()
    until(lambda: squeue().get(high, ("",))[0] == "RUNNING", what="the higher partition's job")
    assert set(cli.states().values()) == {"requeued"}
    cli.done(0, 1, 2, 3)
    for seed in range(4):
        first, second = cli.starts(seed)
        assert first["step"] == 0 and second["step"] >= 3 and second["job"] == first["job"]


def test_a_node_that_dies_loses_its_runs_to_the_other(cli, lab):
    cli.resources(cpus=3)
    cli.stub({"sleep": 0.05, "save_every": 5})
    cli("launch", "seed=0,1", "train.steps=80")
    rows = [cli.running(0, step=8), cli.running(1, step=8)]
    assert {row.node for row in rows} == {"n1", "n2"}
    lost = next(int(r.run.varies["seed"]) for r in rows if r.node == "n2")
    try:
        lab.script("fail", "n2")
        until(lambda: len(cli.starts(lost)) == 2, 60, f"a second start, {cli.rows()[lost]} {squeue()}")
        cli.done(0, 1)
    finally:
        lab.script("mend", "n2")
    second = cli.starts(lost)[1]
    assert second["host"] == "n1" and second["step"] >= 5 and second["restart"] == 1


@pytest.mark.usefixtures("named_nodes")
def test_two_nodes_with_two_tasks_each_are_one_run_also_where_python_finds_no_scontrol(cli):
    # As in a container: the job's script, outside, requeues.
    python = f"env PATH={cli.folder / 'empty'} {sys.executable}"
    cli.resources(nodes=2, tasks=2, python=python)
    cli.stub({"sleep": 0.05, "save_every": 1000})
    cli("launch", "seed=0", "train.steps=100")
    job = cli.running(0, step=5).job
    subprocess.run(["scancel", "--signal=USR2", job], check=True)
    until(lambda: len(cli.starts(0)) == 2, 90, f"a second start, {cli.rows()[0]}")
    cli.done(0)
    assert cli.starts(0)[1]["step"] >= 5
    summary = json.loads((Path(cli.rows()[0].run.folder) / "summary.json").read_text())
    assert summary["world"] == "4" and summary["master"] in ("n1", "n2")


def test_two_shells_at_once_submit_nothing_twice(cli):
    shells = [cli.shell("launch", "seed=0,1") for _ in range(2)]
    said = [shell.communicate(timeout=120)[0] for shell in shells]
    assert sorted("submitted 2 runs" in text for text in said) == [False, True], said
    cli.done(0, 1)
    assert len(cli.sweep.batches()) == 1 and [len(cli.starts(seed)) for seed in (0, 1)] == [1, 1]
