"""Sweeps on a real Slurm cluster (marker `slurm`): what is submitted, interrupted, killed and taken up again."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from slurm_lab import STUB, Launcher, lab, named_nodes, squeue, until, use_stubs, write_grid  # noqa: F401

from sweeps import command as sweeps_command
from sweeps import slurm

pytestmark = pytest.mark.slurm
ROOT = Path(__file__).resolve().parents[2]


class SlurmLauncher(Launcher):
    """The commands on the cluster of this machine."""

    def __init__(self, folder, capsys):
        super().__init__(folder, capsys, seeds=(0, 1, 2, 3), sleep=0.02)
        self.place = [f"cluster={folder / 'lab.yaml'}"]
        self.resources(throttle=8)

    def resources(self, **changes):
        values = {"kind": "slurm", "time": "1:00:00", "signal_s": 60, **changes}
        (self.folder / "lab.yaml").write_text(yaml.safe_dump(values))

    def starts(self, seed):
        return [e for e in self.events(seed) if e["event"] == "start"]

    def running(self, seed, step=1):
        def look():
            row = self.rows()[seed]
            return row if row.state == "running" and (row.step or 0) >= step else None

        return until(look, what=f"seed {seed} to run, {self.states()}")

    def done(self, *seeds, seconds=90):
        until(
            lambda: all(self.states()[s] == "done" for s in seeds),
            seconds,
            f"{seeds}: {self.rows()}",
        )

    def log(self, seed, kind="err"):
        name = self.rows()[seed].run.name
        batch = [b for b in self.sweep.batches() if name in b.runs][-1]
        return self.sweep.log(batch, name, kind).read_text()


@pytest.fixture
def shop(lab, tmp_path, capsys, monkeypatch):  # noqa: F811
    for key, value in lab.environment().items():
        monkeypatch.setenv(key, value)
    use_stubs(monkeypatch)
    made = SlurmLauncher(tmp_path, capsys)
    yield made
    subprocess.run(["scancel", "--user", str(os.getuid())], check=False)
    until(
        lambda: not any(slurm.QueueJob(i, s[0]).live for i, s in squeue().items()),
        what="an empty queue",
    )


def test_an_array_runs_throttled_and_status_agrees_with_squeue(shop):
    shop.stub({"sleep": 0.05})
    assert "submitted 4 runs as job" in shop("launch", "--throttle", "2")
    assert "4 of 4 in the queue or running" in shop("launch")
    seen = set()
    while True:
        before, rows, after = squeue(), shop.rows(), squeue()
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
    assert len(shop.sweep.batches()) == 1
    text = shop("launch")
    assert "4 of 4 done" in text and "nothing to submit" in text
    lines = shop("status").splitlines()
    assert lines[-1] == "4 done" and lines[0].startswith("done      dit-T4-mnist_none_s0-")
    code = (shop.sweep.root / ".sweeps" / "code").iterdir()
    assert shop.sweep.batches()[0].code in [p.name for p in code]
    for seed in range(4):
        assert len(shop.starts(seed)) == 1


def test_usr2_saves_requeues_the_same_job_and_goes_on(shop):
    shop.stub({"sleep": 0.1, "save_every": 1000})
    shop("launch", "train.steps=100")
    job = shop.running(2, step=5).job
    subprocess.run(["scancel", "--signal=USR2", job], check=True)
    until(lambda: len(shop.starts(2)) == 2, what="a second start")
    shop.done(0, 1, 2, 3)
    first, second = shop.starts(2)
    ended = next(e for e in shop.events(2) if e["event"] == "end")
    assert ended["how"] == "requeued" and ended["signal"] == "SIGUSR2"
    assert second["job"] == first["job"] == job and second["restart"] == 1
    assert second["step"] == ended["step"] >= 5
    # The one task whose raw id is the array's own must not requeue the others.
    assert [len(shop.starts(seed)) for seed in (0, 1, 3)] == [1, 1, 1]


def test_a_higher_partition_preempts_and_the_run_resumes(shop):
    shop.resources(partition="low", cpus=4)
    shop.stub({"sleep": 0.1, "save_every": 1000})
    shop("launch", "seed=0,1", "train.steps=80")
    shop.running(0, step=3), shop.running(1, step=3)
    urgent = [
        "sbatch",
        "--parsable",
        "-p",
        "high",
        "-N2",
        "--exclusive",
        "-o",
        "/dev/null",
        "--wrap",
        "sleep 4",
    ]
    high = subprocess.run(urgent, capture_output=True, text=True, check=True).stdout.strip()
    until(lambda: squeue().get(high, ("",))[0] == "RUNNING", what="the higher partition's job")
    assert set(shop.states().values()) == {"requeued"}
    shop.done(0, 1)
    for seed in (0, 1):
        first, second = shop.starts(seed)
        assert first["step"] == 0 and second["step"] >= 3 and second["job"] == first["job"]


def test_sigkill_is_failed_and_retry_loses_no_more_than_since_the_last_save(shop):
    shop.stub({"sleep": 0.05, "save_every": 5})
    shop("launch", "seed=0,1", "train.steps=60")
    row = shop.running(1, step=12)
    pid = shop.starts(1)[0]["pid"]
    os.kill(pid, 9)
    until(lambda: shop.states()[1] == "failed", what=f"a failed run, {shop.rows()[1]}")
    assert squeue()[row.job][0] == "FAILED"
    assert shop.rows()[1].why == (
        f"killed by signal 9 (out of memory?), saved step {shop.rows()[1].step}"
    )
    assert shop.rows()[1].step >= 10
    assert "1 of 2 failed: python -m sweeps retry" in shop("launch", "seed=0,1", "train.steps=60")
    # The resources of the last submission are remembered.
    assert sweeps_command.main(["retry", shop.grid, f"paths.runs={shop.runs}"]) == 0
    shop.done(0, 1)
    assert shop.starts(1)[1]["step"] >= 10
    assert "nothing has failed" in shop("retry")


def test_a_node_that_dies_loses_its_runs_to_the_other(shop, lab):  # noqa: F811
    shop.resources(cpus=3)
    shop.stub({"sleep": 0.05, "save_every": 5})
    shop("launch", "seed=0,1", "train.steps=80")
    rows = [shop.running(0, step=8), shop.running(1, step=8)]
    assert {row.node for row in rows} == {"n1", "n2"}
    lost = next(int(r.run.varies["seed"]) for r in rows if r.node == "n2")
    try:
        lab.script("fail", "n2")
        until(
            lambda: len(shop.starts(lost)) == 2,
            60,
            f"a second start, {shop.rows()[lost]} {squeue()}",
        )
        shop.done(0, 1)
    finally:
        lab.script("mend", "n2")
    second = shop.starts(lost)[1]
    assert second["host"] == "n1" and second["step"] >= 5 and second["restart"] == 1


def test_a_failing_run_is_failed_in_slurm_with_its_traceback(shop):
    shop.stub({"sleep": 0.02}, seed1={"fail": 7})
    shop("launch")
    shop.done(0, 2, 3)
    until(lambda: shop.states()[1] == "failed", what="a failed run")
    row = shop.rows()[1]
    until(lambda: squeue()[row.job][0] == "FAILED", what="FAILED in squeue")
    assert "the loss is not a number at step 7" in row.why and "stub_training.py:" in row.why
    assert "Traceback (most recent call last)" in shop.log(1)
    line = next(x for x in shop("status").splitlines() if x.startswith("failed"))
    assert "RuntimeError: the loss is not a number at step 7" in line
    assert "1 of 4 failed" in shop("launch") and len(shop.sweep.batches()) == 1
    shop.stub({"sleep": 0.02})
    shop("retry")
    shop.done(0, 1, 2, 3)


def test_a_run_that_hears_no_usr2_is_requeued_from_its_last_save(shop):
    shop.resources(signal_s=5)
    shop.stub({"sleep": 0.05, "save_every": 5, "deaf": True})
    shop("launch", "seed=0", "train.steps=2000")
    job = shop.running(0, step=12).job
    subprocess.run(["scancel", "--signal=USR2", job], check=True)
    until(lambda: len(shop.starts(0)) == 2, what=f"a second start, {shop.events(0)}")
    assert "not answered in time" in shop.events(0)[1]["signal"] and shop.starts(0)[1]["step"] >= 10
    shop("cancel")


def test_term_saves_and_waits_for_what_slurm_decides(shop):
    shop.stub({"sleep": 0.05, "save_every": 1000})
    shop("launch", "seed=0", "train.steps=100")
    job = shop.running(0, step=5).job
    subprocess.run(["scancel", "--signal=TERM", job], check=True)
    until(lambda: shop.events(0)[-1].get("how") == "stopped", what="a stop")
    # A pre-emption without a warning signal ends like this: Slurm requeues.
    assert squeue()[job][0] == "RUNNING"
    subprocess.run(["scontrol", "requeue", job], check=True)
    shop.done(0)
    assert shop.starts(0)[1]["step"] >= 5


def test_no_progress_three_times_is_given_up(shop):
    shop.stub({"sleep": 0.05, "stuck": True})
    shop("launch", "seed=0", "train.steps=500")
    for attempt in (1, 2, 3):
        until(
            lambda n=attempt: len(shop.starts(0)) == n, what=f"attempt {attempt}, {shop.rows()[0]}"
        )
        # Not before its handlers are there: a starting process dies of the signal or loses it.
        job = shop.running(0, step=1).job
        subprocess.run(["scancel", "--signal=USR2", job], check=True)
    until(lambda: shop.states()[0] == "failed", what=f"a given-up run, {shop.rows()[0]}")
    assert "given up: 3 attempts started at step 0" in shop.rows()[0].why
    until(lambda: squeue()[job][0] == "FAILED", what="FAILED in squeue")
    shop.stub({"sleep": 0.01})
    shop("retry")
    shop.done(0)


@pytest.mark.usefixtures("named_nodes")
def test_two_nodes_with_two_tasks_each_are_one_run_also_where_python_finds_no_scontrol(shop):
    # As in a container: the job's script, outside, requeues.
    python = f"env PATH={shop.folder / 'empty'} {sys.executable}"
    shop.resources(nodes=2, tasks=2, python=python)
    shop.stub({"sleep": 0.05, "save_every": 1000})
    shop("launch", "seed=0", "train.steps=100")
    job = shop.running(0, step=5).job
    subprocess.run(["scancel", "--signal=USR2", job], check=True)
    until(lambda: len(shop.starts(0)) == 2, 90, f"a second start, {shop.rows()[0]}")
    shop.done(0)
    assert shop.starts(0)[1]["step"] >= 5
    summary = json.loads((Path(shop.rows()[0].run.folder) / "summary.json").read_text())
    assert summary["world"] == "4" and summary["master"] in ("n1", "n2")


def test_two_shells_at_once_submit_nothing_twice(shop):
    words = [sys.executable, "-m", "sweeps", *shop.words("launch")]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{STUB}"}
    shells = [
        subprocess.Popen(words, cwd=shop.folder, env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [shell.communicate(timeout=120)[0] for shell in shells]
    assert sorted("submitted 4 runs" in text for text in said) == [False, True], said
    shop.done(0, 1, 2, 3)
    assert len(shop.sweep.batches()) == 1 and [len(shop.starts(s)) for s in range(4)] == [1] * 4


def test_a_submission_that_was_cut_off_is_found_by_its_name(shop):
    shop.stub({"sleep": 0.05})
    shop("launch", "train.steps=2000")
    file = shop.sweep.path / "batches.jsonl"
    intent, ids = file.read_text().splitlines()
    file.write_text(intent + "\n")
    assert "4 of 4 in the queue or running" in shop("launch", "train.steps=2000")
    assert shop.sweep.batches()[0].ids == json.loads(ids)["ids"]
    assert "cancelled 4 of 4" in shop("cancel")


def test_cancel_stops_what_is_live_and_launch_submits_it_again(shop):
    shop.stub({"sleep": 0.05, "save_every": 5})
    shop("launch", "--throttle", "1", "train.steps=100")
    shop.running(0, step=6)
    assert "cancelled 4 of 4" in shop("cancel")
    until(lambda: set(shop.states().values()) == {"stopped"}, what=f"stopped runs, {shop.rows()}")
    shop.stub({"sleep": 0.01})
    assert "submitted 4 runs" in shop("launch", "train.steps=100")
    shop.done(0, 1, 2, 3)
    assert shop.starts(0)[1]["step"] >= 5


def test_more_runs_than_an_array_may_have_run_in_sequence(shop, monkeypatch):
    monkeypatch.setattr(slurm, "max_array", lambda *_: 2)
    shop.stub({"sleep": 0.02})
    shop("launch", "seed=0,1,2")
    jobs = [shop.rows()[seed].job for seed in range(3)]
    assert jobs[0].split("_")[0] == jobs[1].split("_")[0] != jobs[2].split("_")[0]
    shop.done(0, 1, 2)
    ended = max(shop.events(s)[-1]["time"] for s in (0, 1))
    assert shop.starts(2)[0]["time"] >= ended


def test_a_wrong_partition_is_one_sentence_and_nothing_counts_as_submitted(shop):
    text = shop("launch", "cluster.partition=nowhere", code=2)
    said, error = text.rstrip().splitlines()  # a grid in Python is said to be code, then the refusal
    assert "is code" in said and error.startswith("error: sbatch refused:")
    assert "partition" in error
    assert not shop.sweep.runs() and shop.sweep.batches() == []
    shop("launch", "seed=0")
    shop.done(0)
    before = shop.sweep.runs(), shop.sweep.batches()
    shop("launch", "cluster.partition=nowhere", code=2)
    assert (shop.sweep.runs(), shop.sweep.batches()) == before


def test_gpus_and_setup_are_asked_for_and_the_snapshot_is_what_runs(shop):
    setup = ["export SAID='a: b'", 'echo "on $SLURMD_NODENAME $SAID"']
    shop.resources(gpus="a100:1", setup=setup)
    shop("launch", "seed=0")
    # Asked for by the site's own option, not twice.
    shop("launch", "seed=1", "cluster.extra={gres: gpu:a100:2, comment: x y}")
    shop.done(0, 1)
    scripts = "".join(path.read_text() for path in shop.sweep.logs.glob("*_submission.sh"))
    for line in ("--gpus-per-node=a100:1", "--gres=gpu:a100:2"):
        assert scripts.count(f"#SBATCH {line}\n") == 1
    assert scripts.count("--gpus") == 1 and "a: b" in shop.log(0, "out")
    batch = shop.sweep.batches()[0]
    assert batch.code in scripts and shop.starts(0)[0]["code"] == batch.code
    assert "1 of 1 done" in shop("launch", "seed=0") and "type cluster= again" in shop_retry(shop)


def shop_retry(shop):
    shop.place = []
    return shop("retry", code=2)


def test_a_held_job_is_released_as_status_says(shop):
    shop("launch", "seed=0,1", "--throttle", "1", "train.steps=100")
    job = shop.rows()[1].job
    subprocess.run(["scontrol", "hold", job], check=True)
    why = until(lambda: shop.rows()[1].why, what="a reason")
    assert why.startswith("held (JobHeld") and why.endswith(f": scontrol release {job}")
    subprocess.run(why.partition(": ")[2].split(), check=True)
    shop.done(0, 1)


def test_a_search_prunes_and_goes_on_after_a_kill(shop):
    over = {"train.lr": {"low": 1e-5, "high": 1e-1, "log": True}}
    path = write_grid(
        shop.folder, base={"train.steps": 100, "eval.every": 10, "route": "2-8"}, seeds=[0],
        search={"trials": 10, "over": over},
    )  # fmt: skip
    shop.grid = path
    shop.stub({"sleep": 0.05})
    call = [sys.executable, "-m", "sweeps", *shop.words("launch", "--throttle", "3")]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{STUB}"}
    with subprocess.Popen(call, cwd=shop.folder, env=env, stdout=subprocess.DEVNULL) as coordinator:
        until(lambda: len(list(shop.runs.glob("dit-*"))) > 3)
        coordinator.send_signal(signal.SIGKILL)
    text = shop("launch", "--throttle", "3")
    assert "trials of an earlier start go on" in text and "best of fd: trial" in text
    text = shop("status")
    # A pruned run may still be saving.
    assert text.count("\ntrial ") == 10 and "running" not in text.partition("search: ")[2]
    # Trained once each, or stopped on the way.
    assert all(len(p.read_text().split()) == 1 for p in shop.runs.glob("dit-*/ends.txt"))
