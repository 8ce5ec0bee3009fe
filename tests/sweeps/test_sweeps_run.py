"""Launching: in this process, in a pool, and what is submitted and noted; the job itself."""

import errno
import json
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import submitit
from slurm_lab import make_run, until, write_grid

import experiments.runtime.command
from experiments.runtime import run_folder
from experiments.runtime.records import append_jsonl
from sweeps import SweepError
from sweeps import command as sweeps_command
from sweeps.jobs import job, pool_process, sbatch_script, slurm
from sweeps.status import status
from sweeps.store.folder import JobBatch, Sweep

pytestmark = pytest.mark.usefixtures("stubs")


# --- in this process -------------------------------------------------------------------------------------------


def test_debug_runs_everything_and_the_same_command_nothing(cli):
    text = cli("launch", "cluster=debug")
    assert "1/2" in text and "2/2" in text and cli.states() == {0: "done", 1: "done"}
    assert "nothing to submit" in cli("launch", "cluster=debug")
    # More steps continue the same runs.
    cli("launch", "cluster=debug", "train.steps=30")
    assert [e["step"] for e in cli.events(0) if e["event"] == "start"] == [0, 20]
    # A further seed joins the sweep; the others were trained for longer than this launch asks.
    text = cli("launch", "cluster=debug", "seed=0,1,5")
    assert "2 of 3 done (extended: trained for more steps than asked)" in text
    lines = cli("status").splitlines()
    assert sum("30/20 steps (extended)" in line for line in lines) == 2 and lines[-1] == "3 done (2 extended)"
    assert cli("status", "seed=5").count("_s5-") == 1


def test_a_run_of_another_shell_is_running(cli, monkeypatch):
    cli("launch", "cluster=debug")
    row = cli.rows()[0]
    monkeypatch.setattr(Sweep, "is_done", lambda self, run: False)
    cli.sweep.note(row.run.name, "start", step=0, pid=os.getpid(), host=job.host())
    assert cli.rows()[0].live and "press Ctrl-C there" in cli("cancel")
    # A launch that leaves it alone changes nothing of it.
    assert "1 of 1 in the queue or running" in cli("launch", "cluster=debug", "seed=0", "train.steps=5")
    assert cli.rows()[0].steps == 20
    (cli.sweep.path / "sweep.json").unlink()  # as one does with a damaged one
    cli("launch", "cluster=debug")
    assert cli.rows()[0].live
    cli.sweep.note(row.run.name, "start", step=0, pid=2**22 + 1, host=job.host())  # no such process
    assert cli.states()[0] == "failed"
    # A process that is younger than the start bears the number of the one that was killed.
    started = {"event": "start", "time": 1e9, "pid": os.getpid(), "host": job.host()}
    append_jsonl(cli.sweep.attempts(row.run.name), [started])
    assert cli.states()[0] == "failed"


def test_a_failure_is_shown_and_the_next_run_starts(cli):
    cli.stub({"sleep": 0}, seed0={"fail": 3})
    text = cli("launch", "cluster=debug", code=1)
    assert "1 of 2 failed" in text and "the loss is not a number at step 3" in text and "Traceback" in text
    assert cli.states() == {0: "failed", 1: "done"}
    first = cli("status").splitlines()[0]
    assert re.search(r"RuntimeError: the loss is not a number at step 3  \(.*stub_training.py:\d+\)$", first)
    assert "1 of 2 failed; add --retry" in cli("launch", "cluster=debug")
    cli.stub({"sleep": 0})
    cli("launch", "cluster=debug", "--retry")
    assert cli.states() == {0: "done", 1: "done"}
    lines = cli("show", "--run", "_s0-")
    assert lines.count("batch ") >= 2 and "how failed" in lines and "how done" in lines


def test_ctrl_c_saves_and_stops_the_sweep(cli):
    cli.stub({"sleep": 0.02})
    shell = cli.shell("launch", "cluster=debug", "train.steps=1000")
    until(lambda: list(cli.runs.glob("*/checkpoints/*")), what="a checkpoint")
    shell.send_signal(signal.SIGINT)
    output = shell.communicate(timeout=60)[0]
    assert shell.returncode == 1 and "stopped" in output and "Traceback" not in output
    assert cli.states() == {0: "stopped", 1: "stopped"} or cli.states() == {0: "stopped", 1: "new"}
    assert cli.rows()[0].step > 3


def test_stages_follow_each_other_in_this_process(cli):
    cli.grid = write_grid(
        cli.folder, seeds=[0, 1],
        stages=[{"name": "score", "of": "train", "command": "score", "args": ["{parent}", "{out}"],
                 "base": {"n": 3}, "axes": {"w": [1, 2]}}],
    )  # fmt: skip
    cli("launch", "cluster=debug", "score:n=4", "score:w=2,5")
    rows, _ = status.statuses(cli.sweep)
    assert [row.state for row in rows] == ["done"] * 6
    scores = [json.loads(p.read_text()) for p in (cli.sweep.path / "outputs").iterdir()]
    assert sorted(words[-1] for words in scores) == ["w=2", "w=2", "w=5", "w=5"]
    assert all(words[2] == "n=4" and Path(words[0], "summary.json").exists() for words in scores)
    # A filter of runs takes what scores them with it.
    assert cli("status", "scale=tiny").splitlines()[-1] == "6 done"
    assert cli("status", "train.steps=20", "w=5").count("done  ") == 2
    # Longer training is scored again.
    cli("launch", "cluster=debug", "score:n=4", "score:w=2", "seed=0", "train.steps=21")
    rows, _ = status.statuses(cli.sweep)
    assert [row.why for row in rows if row.state != "done"] == ["its run was trained further"]


def test_a_command_that_refuses_its_words_is_a_sentence_here_and_a_traceback_in_the_log(cli):
    cli.grid = write_grid(cli.folder, command="seven", args=["x"], base={}, seeds=[0])
    text = cli("launch", "cluster=debug", code=1)
    assert "error: stub_command:seven returned 7" in text and "Traceback" not in text
    (log,) = cli.sweep.logs.glob("*.err")
    assert "Traceback" in log.read_text()


def test_a_job_inherits_nothing_that_holds_for_the_launching_process_alone(monkeypatch):
    spins = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "0"}
    monkeypatch.setattr(experiments.runtime.command, "_SPIN_VARIABLES", spins)
    # Of this process, of the user, of the shell's own job (two), of the cluster.
    variables = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "3", "SLURM_ARRAY_JOB_ID": "7", "SLURMD_NODENAME": "n1"}
    for name, value in {**variables, "SLURM_CONF": "c"}.items():
        monkeypatch.setenv(name, value)
    with sbatch_script.sbatch_environment(Path("code")):
        assert [name for name in os.environ if name.startswith("SLURM")] == ["SLURM_CONF"]
        assert "GOMP_SPINCOUNT" not in os.environ and os.environ["KMP_BLOCKTIME"] == "3"
    assert os.environ.items() >= variables.items()


# --- a pool on this machine ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_runs_of_a_pool_are_requeued_on_usr2_saved_by_cancel_and_may_be_killed(cli):
    cli.stub({"sleep": 0.03, "save_every": 1000})
    cli("launch", "cluster=local", "seed=0,1", "train.steps=2000")
    until(lambda: cli.rows()[0].state == "running" and (cli.rows()[0].step or 0) > 3, what="a step")
    assert cli.rows()[1].state == "pending" and "in the queue or running" in cli("launch", "cluster=local")
    start = next(e for e in cli.events(0) if e["event"] == "start")
    os.kill(start["pid"], signal.SIGUSR2)
    until(lambda: (cli.rows()[1].step or 0) > 3, what="the other run")
    assert cli.rows()[0].state == "requeued" and cli.rows()[0].step > 3
    assert "cancelled 2 of 2" in cli("cancel")
    until(lambda: not any(row.live for row in cli.rows().values()), what="an empty pool")
    assert cli.states() == {0: "stopped", 1: "stopped"} and cli.rows()[1].step > 3
    # They go on from there; one that is killed lets the next one start.
    cli.stub({"sleep": 0.02})
    cli("launch", "cluster=local", "seed=0,1", "train.steps=150")
    until(lambda: cli.rows()[0].state == "running", what="a second start")
    os.kill(cli.events(0)[-1]["pid"], signal.SIGKILL)
    until(lambda: cli.rows()[1].state == "running", what="the next one")
    assert (cli.states()[0], cli.rows()[0].why) == ("failed", "killed by signal 9 (out of memory?)")
    assert [e["step"] > 3 for e in cli.events(1) if e["event"] == "start"] == [False, True]


def test_runs_whose_pool_was_killed_go_on_and_can_be_cancelled(cli):
    cli.stub({"sleep": 0.05})
    words = ["launch", "cluster=local", "cluster.workers=2", "train.steps=1000"]
    cli(*words, "seed=0,1,2")
    until(lambda: cli.states() == {0: "running", 1: "running", 2: "pending"}, what="two runs")
    (folder,) = (cli.sweep.path / "pools").iterdir()
    os.kill(run_folder.read(folder / "state.json")["pid"], signal.SIGKILL)
    until(lambda: cli.states() == {0: "running", 1: "running", 2: "stopped"}, what="the pool's end")
    assert "its job is gone" in cli.rows()[2].why
    text = cli(*words, "seed=0")
    assert "1 of 1 in the queue or running" in text and "nothing to submit" in text
    assert "nothing has failed or is missing" in cli(*words, "seed=0", "--retry")
    os.kill(next(event["pid"] for event in cli.events(1)), signal.SIGKILL)
    assert "cancelled 1 of 1" in cli("cancel", "seed=0")
    until(lambda: cli.states() == {0: "stopped", 1: "failed", 2: "stopped"}, what="their ends")
    *_, start, _, end = cli.events(0)
    assert (start["event"], end["how"]) == ("start", "stopped") and end["step"] > 0


def test_a_pool_outlives_a_full_disk(tmp_path, monkeypatch):
    def refused(path, content):
        refusals.append(len(started))
        if len(refusals) < 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        honest(path, content)

    def popen(words, **_):
        tries.append(words[-1])
        if len(tries) == 2:  # as its logs could not be opened
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        started.append(words[-1])
        return SimpleNamespace(returncode=0, poll=lambda: 0)

    honest, refusals, started, tries = pool_process.atomic_write, [], [], []
    values = {"jobs": {"a": "a.json", "b": "b.json"}, "workers": 1, "logs": str(tmp_path)}
    (tmp_path / "pool.json").write_text(json.dumps({**values, "root": str(tmp_path), "sweep": "g"}))
    state = Sweep(tmp_path, "g").pools / tmp_path.name / "state.json"
    monkeypatch.setattr(pool_process, "atomic_write", refused)
    monkeypatch.setattr(pool_process.subprocess, "Popen", popen)
    monkeypatch.setattr(pool_process.signal, "signal", lambda *_: None)
    pool_process.Pool(tmp_path).run()
    assert started == ["a.json", "b.json"] and refusals[:4] == [0, 0, 0, 0]
    assert run_folder.read(state)["runs"] == {"a": "ENDED", "b": "ENDED"}


def test_a_pool_ends_on_a_disk_that_stays_full(tmp_path, monkeypatch):
    def refused(*_):
        tries.append(1)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tries = []
    (tmp_path / "pool.json").write_text(json.dumps({"jobs": {}, "workers": 1, "logs": "", "root": "", "sweep": "g"}))
    monkeypatch.setattr(pool_process, "atomic_write", refused)
    monkeypatch.setattr(pool_process.signal, "signal", lambda *_: None)
    monkeypatch.setattr(pool_process.time, "sleep", lambda _: None)
    pool_process.Pool(tmp_path).run()
    assert len(tries) == 100


def test_status_shows_all_sweeps_and_whose_job_a_run_is(cli):
    cli("launch", "cluster=debug")
    mine, cli.grid = cli.grid, write_grid(cli.folder, "second", seeds=[0, 1, 2])
    cli.stub({"sleep": 0.02})
    cli("launch", "cluster=local", "train.steps=500", "seed=1,2")
    cli.grid = mine
    text = cli("launch", "cluster=debug", "train.steps=500", "seed=1")
    assert "1 of 1 queued by sweep second: python -m sweeps status second" in text
    assert "nothing to submit" in text and "queued by sweep second" in cli("status", "seed=1")
    assert "python -m sweeps cancel second" in cli("cancel", "seed=1")
    assert "queued by sweep second" in cli("launch", "cluster=debug", "train.steps=500", "seed=1", "--retry")
    text = cli("launch", "cluster=local", "train.steps=30", "seed=0")  # of this sweep, beside the other's pool
    assert re.search(r"other pools? (is|are) running on this machine: .*\bsecond\b", text)
    capture = cli.capsys.readouterr
    assert sweeps_command.main(["status", f"paths.runs={cli.runs}"]) == 0
    first, second = capture().out.splitlines()
    assert first.split()[0] == "count" and second.split()[0] == "second" and "elapsed 0:" in second
    assert sweeps_command.main(["status", "seed=2", f"paths.runs={cli.runs}", "--json"]) == 0
    (values,) = json.loads(capture().out)
    assert values["sweep"] == "second" and [r["label"] for r in values["runs"]] == ["seed=2"]
    cli.grid = "second"
    assert json.loads(cli("status", "--json"))["sweep"] == "second"
    assert "cancelled 2 of 2" in cli("cancel")
    until(lambda: not any(row.live for row in status.statuses(Sweep(cli.runs, "second"))[0]), what="the pool's end")


def test_a_typed_throttle_changes_live_arrays(cli, answers, submissions):
    cli("launch", "cluster=slurm", "--throttle", "2")
    (batch,) = cli.sweep.batches()
    answers.queue |= {i: slurm.QueueJob(i, "PENDING", name=batch.name) for i in ("1_0", "1_1")}
    # Neither the default nor the limit that it has is a change.
    cli("launch", "cluster=slurm")
    cli("launch", "cluster=slurm", "--throttle", "2")
    assert answers.calls == [] and cli.sweep.batches()[0].resources["throttle"] == 2
    text = cli("launch", "cluster=slurm", "--throttle", "5")
    assert answers.calls == [["scontrol", "update", "JobId=1", "ArrayTaskThrottle=5"]]
    assert "job 1: at most 5 at once from now on" in text and "nothing to submit" in text
    assert cli.sweep.batches()[0].resources["throttle"] == 5


def test_a_typed_throttle_counts_runs_where_four_share_a_task(cli, answers, submissions):
    words = ["cluster=slurm", "cluster.gpus=1", "cluster.runs_per_gpu=4", "seed=0,1,2,3,4,5,6,7,8"]
    cli("launch", *words, "--throttle", "4")
    (batch,) = cli.sweep.batches()
    answers.queue |= {i: slurm.QueueJob(i, "PENDING", name=batch.name) for i in ("1_0", "1_1", "1_2")}
    cli("launch", *words, "--throttle", "8")
    assert answers.calls == [["scontrol", "update", "JobId=1", "ArrayTaskThrottle=2"]]


def noted(sweep):
    """What is on disk of launches, the copy of the code apart."""
    return {p: p.read_bytes() for p in sweep.path.rglob("*") if p.is_file()}


def test_nothing_is_noted_of_a_refused_submission(cli, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    refused = ["cluster=local", "cluster.gpus=1"]
    assert "needs 1 GPUs, 0 are visible; try cluster.gpus=0" in cli("launch", *refused, code=2)
    assert noted(cli.sweep) == {} and not list(cli.runs.glob("dit-*"))
    cli.stub({"sleep": 0}, seed0={"fail": 3})
    cli("launch", "cluster=debug", code=1)
    before = noted(cli.sweep)
    for word in ("--retry", "seed=5"):
        cli("launch", *refused, word, code=2)
        assert noted(cli.sweep) == before


# --- the job ---------------------------------------------------------------------------------------------------


def job_of(run, root, batch="b", folder="", code=None):
    return job.Job(run.__dict__, str(root), "g", str(root / folder), code, None, batch, "debug")


def test_a_fourth_start_from_one_step_in_a_submission_is_given_up(tmp_path):
    run = make_run(tmp_path, args=[f"paths.runs={tmp_path}"])
    sweep = Sweep(tmp_path, "g")
    for how in ("requeued", "requeued", "stopped"):  # stopped: a pre-emption without a warning
        job_of(run, tmp_path).check_progress(0)
        sweep.note("r", "start", step=0, batch="b")
        sweep.note("r", "end", how=how)
    job_of(run, tmp_path).check_progress(5)
    # What is retried, or launched again after a stop, is another submission.
    job_of(run, tmp_path, "c").check_progress(0)
    with pytest.raises(SweepError, match="3 attempts started at step 0"):
        job_of(run, tmp_path)()
    assert sweep.events("r")[-1]["how"] == "failed"


@pytest.mark.parametrize(
    ("entry", "folder", "code", "error"),
    [
        ("stub_command:nothing", "", None, "holds no finished run"),
        ("stub_training:main", "gone", None, "FileNotFoundError: .*gone"),
        ("stub_training:main", "", "other", "not from its copy"),
    ],
)
def test_a_job_that_fails_or_cannot_begin_notes_why(entry, folder, code, error, tmp_path):
    with pytest.raises((FileNotFoundError, SweepError)):
        job_of(make_run(tmp_path, entry=entry), tmp_path, folder=folder, code=code)()
    end = Sweep(tmp_path, "g").events("r")[-1]
    assert end["how"] == "failed" and re.search(error, end["error"])


@pytest.mark.parametrize(("name", "code", "how"), [("usr2", job.REQUEUE, "requeued"), ("term", job.STOPPED, "stopped")])
def test_a_signal_before_training_listens_asks_for_a_requeue(name, code, how, tmp_path):
    before = signal.getsignal(signal.SIGUSR2)
    with pytest.raises(SystemExit) as caught:
        job_of(make_run(tmp_path, entry=f"stub_command:{name}"), tmp_path)()
    assert caught.value.code == code and Sweep(tmp_path, "g").events("r")[-1]["how"] == how
    assert signal.getsignal(signal.SIGUSR2) is before


# --- the disk --------------------------------------------------------------------------------------------------


def test_tasks_of_a_cut_off_submission_are_told_by_their_numbers(tmp_path):
    sweep = Sweep(tmp_path, "g")
    sweep.intend(JobBatch("g.bbbbbbbb", "slurm", "slurm", ["r0", "r1", "r2"], 1.0, "c"))
    queued = {i: slurm.QueueJob(i, "RUNNING", name="g.bbbbbbbb", folder=str(sweep.launches / "l" / "code")) for i in ("18_2", "18_1")}
    status.adopt(sweep, sweep.batches(), queued)  # the first has ended, and left the queue
    assert sweep.batches()[0].ids == {"r1": "18_1", "r2": "18_2"}


@pytest.mark.parametrize(
    ("second", "message"),
    [("QOSMaxSubmitJobPerUserLimit", "refused 1 of the runs: .* the same launch"), ("Socket timed out", "no answer")],
)
def test_the_runs_of_a_refused_or_lost_array_are_told_from_those_before_it(second, message, cli, answers, monkeypatch):
    def sbatch(self, *_):
        calls.append(1)
        if len(calls) > 1:
            raise submitit.core.utils.FailedJobError(second)
        return self.job_class(self.folder, "18")

    calls, answers.max_array = [], 2
    monkeypatch.setattr(submitit.SlurmExecutor, "_submit_command", sbatch)
    monkeypatch.setattr(submitit.core.utils.JobPaths, "move_temporary_file", lambda *_, **__: None)
    monkeypatch.setattr(submitit.SlurmExecutor, "affinity", classmethod(lambda _: 2))
    assert re.search(message, cli("launch", "cluster=slurm", "seed=0,1,2", code=2))
    first, last = cli.sweep.batches()
    assert [*first.ids.values()] == ["18_0", "18_1"] and not last.ids
    answers.queue |= {i: slurm.QueueJob(i, "RUNNING", name=first.name) for i in ("18_0", "18_1")}
    assert cli.states() == {0: "starting", 1: "starting", 2: "new"}
    # It came through all the same.
    answers.queue |= {"19": slurm.QueueJob("19", "PENDING", name=last.name)}
    assert cli.states()[2] == "pending" and "nothing to submit" in cli("launch", "cluster=slurm", "seed=0,1,2")


# --- the command line ------------------------------------------------------------------------------------------


def test_lists_of_sbatch_and_a_folder_with_a_comma_are_one_value(tmp_path, capsys):
    words = ["launch", "selection_rate", "--dry-run", f"paths.runs='{tmp_path},b'", "--throttle", "2"]
    assert sweeps_command.main([*words, "cluster.exclude=n1,n2", "cluster.partition=a,b", "backbone=rwkv"]) == 0
    out = capsys.readouterr().out
    assert "--exclude=n1,n2\n" in out and "--partition=a,b\n" in out and f"{tmp_path},b/.sweeps" in out
    assert "--array=0-3%2" in out and "rwkv-T4-mnist_2-8@0.25_s0" in out  # words may stand behind flags
