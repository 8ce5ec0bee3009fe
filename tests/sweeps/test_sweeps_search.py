"""Searches: trials asked and told, killed and gone on with, pruned, and what is refused."""

import json
import os
import signal
import subprocess
import sys

import pytest
from slurm_lab import COMMANDS, STUB, until, write_grid
from small import ROOT

from sweeps import command as sweeps_command
from sweeps.store.folder import Sweep
from sweeps.submission.optuna_study import distributions, import_optuna, study_location, summary

pytest.importorskip("optuna")
OVER = {
    "start": {"low": 0, "high": 3}, "end": [8, 9], "rate": {"low": 0.25, "high": 0.75, "step": 0.25},
    "train.lr": {"low": 1e-5, "high": 1e-1, "log": True},
}  # fmt: skip
BASE = {"train.steps": 4, "eval.every": 2, "route": "{start}-{end}@{rate}"}


pytestmark = pytest.mark.usefixtures("stubs")


def make(folder, name="seek", steps=4, trials=3, sleep=0.0, **changes):
    runs = folder / "runs"
    runs.mkdir(exist_ok=True)
    (runs / "stub.json").write_text(json.dumps({"*": {"sleep": sleep}}))
    values = {"base": BASE | {"train.steps": steps}, "seeds": [0], "search": {"trials": trials, "over": OVER}}
    return [write_grid(folder, name, **values | changes), f"paths.runs={runs}"], Sweep(runs, name)


def trials(sweep):
    return [line.split() for line in summary(sweep) if line.startswith("trial")]


@pytest.mark.slow
def test_trials_are_asked_and_told_and_go_on_to_a_larger_number(tmp_path, capsys):
    words, sweep = make(tmp_path)
    assert sweeps_command.main(["launch", *words, "cluster=debug"]) == 0
    out = capsys.readouterr().out
    assert "best of fd: trial" in out and [t[2] for t in trials(sweep)] == ["complete"] * 3
    # Values that are filled into the route, and a key that stands for itself, reach the run.
    for run in sweep.runs().values():
        assert run.varies["route"].count("@") == 1 and 1e-5 <= float(run.varies["train.lr"]) <= 1e-1
    assert sweeps_command.main(["launch", *words, "cluster=debug", "--trials", "5"]) == 0
    assert len(trials(sweep)) == 5
    capsys.readouterr()
    assert sweeps_command.main(["status", *words]) == 0
    out = capsys.readouterr().out
    assert "search: 5 complete" in out and "best of fd: trial" in out
    best = min(float(t[3]) for t in trials(sweep))
    assert f" {best:.4g} " in out.splitlines()[-1]


@pytest.mark.slow
def test_a_killed_coordinator_goes_on_and_bad_trials_are_pruned(tmp_path):
    words, sweep = make(tmp_path, steps=60, trials=7, sleep=0.03)
    call = [sys.executable, "-m", "sweeps", "launch", *words, "cluster=local", "cluster.workers=2"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{STUB}"}
    for seen in (1, 3):
        with subprocess.Popen(call, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL) as coordinator:
            until(lambda n=seen: len(trials(sweep)) > n and trials(sweep)[n][-1].startswith("dit"))
            coordinator.send_signal(signal.SIGKILL)
    done = subprocess.run(call, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "resuming" in done.stdout and "pruned  at step" in done.stdout
    found = trials(sweep)
    assert len(found) == 7 and {t[2] for t in found} == {"complete", "pruned"}
    runs = list((tmp_path / "runs").glob("dit-*"))
    assert {r.name for r in runs} == {t[-1] for t in found}
    for run in runs:  # trained once, or stopped on the way
        ends = run / "ends.txt"
        assert not ends.exists() or len(ends.read_text().splitlines()) == 1


def test_ctrl_c_stops_a_search_in_this_process_and_its_trial_goes_on_later(tmp_path):
    words, sweep = make(tmp_path, steps=100, trials=2, sleep=0.03)
    call = [sys.executable, "-m", "sweeps", "launch", *words, "cluster=debug"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{STUB}"}
    with subprocess.Popen(call, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as shell:
        until(lambda: list(tmp_path.glob("runs/dit-*/checkpoints/*")), what="a checkpoint")
        shell.send_signal(signal.SIGINT)
        said = shell.communicate(timeout=60)[0]
    assert "the same command to resume" in said and [t[2] for t in trials(sweep)] == ["running"]
    (tmp_path / "runs" / "stub.json").write_text(json.dumps({"*": {"sleep": 0}}))
    assert sweeps_command.main(["launch", *words, "cluster=debug"]) == 0
    assert [t[2] for t in trials(sweep)] == ["complete"] * 2


def test_values_of_lists_and_steps_are_exact_and_a_live_trial_of_another_search_stays(tmp_path, capsys):
    over = {"train.lr": [0.00012345], "train.clip": {"low": 0.4375, "high": 0.4375, "step": 0.0625}}
    over["train.ema"] = {"low": 0.1, "high": 0.7, "step": 0.1}
    words, sweep = make(tmp_path, base=BASE | {"route": "none"}, search={"trials": 1, "over": over})
    assert sweeps_command.main(["launch", *words, "cluster=debug"]) == 0
    (run,) = sweep.runs().values()
    assert (float(run.varies["train.lr"]), run.varies["train.clip"]) == (0.00012345, "0.4375")
    assert run.varies["train.ema"] in [f"0.{i}" for i in range(1, 8)]
    assert "train.lr=0.00012345 train.clip=0.4375" in summary(sweep)[0]
    study = import_optuna().load_study(**study_location(sweep))
    live = study.ask(distributions(over))
    live.set_user_attr("run", "r")
    words, _ = make(tmp_path, base=BASE | {"route": "none"}, search={"over": {"train.lr": [0.5]}})
    assert sweeps_command.main(["launch", *words, "cluster=debug"]) == 2
    assert "its search differs from that of its stored trials (trial 0 has train.lr=0.0001" in capsys.readouterr().err
    assert [t[2] for t in trials(sweep)] == ["complete", "running"]


def test_a_missing_optuna_is_one_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert sweeps_command.main(["launch", "search_route", "cluster=debug", f"paths.runs={tmp_path}"]) == 2
    assert "pip install 'optuna>=4'" in capsys.readouterr().err


def test_a_search_that_was_cut_off_before_its_study_has_no_trials(tmp_path):
    journal = tmp_path / ".sweeps" / "g" / "search" / "journal.log"
    journal.parent.mkdir(parents=True)
    journal.write_text('{"op_code": 0, "wor')
    assert summary(Sweep(tmp_path, "g")) == []


# --- grids in Python ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_python_grid_yields_overrides_runs_its_own_command_and_is_kept(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(
        "from pathlib import Path\n"
        "def cells():\n    for lr in (1, 2):\n        yield {'train.lr': lr / 1000, 'route': f'{lr}-8'}\n"
        "def tell(words):\n    Path(words[0]).parent.mkdir(parents=True, exist_ok=True)\n"
        "    Path(words[0]).write_text(Path(__file__).parent.name)\n"
        f"base = {{'train.steps': 2}}\ncommands = {{'train': {COMMANDS['train']!r}, 'tell': tell}}\n"
        "stages = [{'name': 'note', 'of': 'train', 'command': 'tell', 'args': ['{out}']}]\n"
    )
    words = [str(path), f"paths.runs={tmp_path / 'runs'}"]
    sweep = Sweep(tmp_path / "runs", "mine")
    for _ in range(2):  # the second stage waits for the first
        assert sweeps_command.main(["launch", *words, "cluster=local"]) == 0
        until(lambda: all(map(sweep.is_done, sweep.runs().values())), what="the runs")
    assert "mine.py is code: it is executed" in capsys.readouterr().err
    assert {r.varies["route"] for r in sweep.runs().values() if r.trains} == {"1-8", "2-8"}
    # The job ran the file that was submitted.
    batch = sweep.batches()[-1]
    assert {p.read_text() for p in (sweep.path / "outputs").iterdir()} == {batch.code}
    assert (sweep.snapshots / batch.code / "mine.py").read_text() == path.read_text()
    # By the name alone nobody has said that its code may be run.
    assert sweeps_command.main(["retry", "mine", words[1]]) == 2
    assert "type python -m sweeps retry PATH/mine.py" in capsys.readouterr().err
