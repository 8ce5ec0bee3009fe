"""Searches: trials asked and told, killed and gone on with, pruned, and what is refused."""

import signal
import sys

import pytest
from slurm_lab import until, write_grid

from sweeps import command as sweeps_command
from sweeps.store.folder import Sweep
from sweeps.submission.optuna_study import (
    distributions,
    import_optuna,
    open_study,
    study_location,
    summary,
)

pytest.importorskip("optuna")
OVER = {
    "start": {"low": 0, "high": 3}, "end": [8, 9], "rate": {"low": 0.25, "high": 0.75, "step": 0.25},
    "train.lr": {"low": 1e-5, "high": 1e-1, "log": True},
}  # fmt: skip
BASE = {"train.steps": 4, "eval.every": 2, "route": "{start}-{end}@{rate}"}


def write_search(cli, steps=4, trials=3, **changes):
    values = {"base": BASE | {"train.steps": steps}, "seeds": [0], "search": {"trials": trials, "over": OVER}}
    cli.grid = write_grid(cli.folder, **values | changes)


def trials(cli):
    return [line.split() for line in summary(cli.sweep) if line.startswith("trial")]


@pytest.mark.slow
def test_a_killed_coordinator_goes_on_and_bad_trials_are_pruned(cli):
    write_search(cli, steps=60, trials=7)
    cli.stub({"sleep": 0.03})
    words = ["launch", "cluster=local", "cluster.workers=2"]
    for seen in (1, 3):
        with cli.shell(*words) as coordinator:
            until(lambda n=seen: len(trials(cli)) > n and trials(cli)[n][-1].startswith("dit"))
            coordinator.send_signal(signal.SIGKILL)
    text = cli(*words)
    assert "resuming" in text and "pruned  at step" in text
    rows = trials(cli)
    assert len(rows) == 7 and {t[2] for t in rows} == {"complete", "pruned"}
    runs = list(cli.runs.glob("dit-*"))
    assert {r.name for r in runs} == {t[-1] for t in rows}
    # Trained once, or stopped on the way.
    assert all(len(ends.read_text().splitlines()) == 1 for ends in cli.runs.glob("dit-*/ends.txt"))


def test_ctrl_c_stops_a_search_whose_trial_goes_on_later_and_more_trials_follow(cli):
    write_search(cli, steps=100, trials=2)
    cli.stub({"sleep": 0.03})
    with cli.shell("launch", "cluster=debug") as shell:
        until(lambda: list(cli.runs.glob("dit-*/checkpoints/*")), what="a checkpoint")
        shell.send_signal(signal.SIGINT)
        output = shell.communicate(timeout=60)[0]
    assert "the same command to resume" in output and [t[2] for t in trials(cli)] == ["running"]
    cli.stub({"sleep": 0})
    assert "best of fd: trial" in cli("launch", "cluster=debug") and [t[2] for t in trials(cli)] == ["complete"] * 2
    cli("launch", "cluster=debug", "--trials", "3")
    text, best = cli("status"), min(float(trial[3]) for trial in trials(cli))
    assert "search: 3 complete" in text and f" {best:.4g} " in text.splitlines()[-1]
    # Values that are filled into the route, and a key that stands for itself, reach the run.
    for run in cli.sweep.runs().values():
        assert run.varies["route"].count("@") == 1 and 1e-5 <= float(run.varies["train.lr"]) <= 1e-1


def test_values_of_lists_and_steps_are_exact_and_a_live_trial_of_another_search_stays(cli):
    over = {"train.lr": [0.00012345], "train.clip": {"low": 0.4375, "high": 0.4375, "step": 0.0625}}
    over["train.ema"] = {"low": 0.1, "high": 0.7, "step": 0.1}
    write_search(cli, base=BASE | {"route": "none"}, search={"trials": 1, "over": over})
    cli("launch", "cluster=debug")
    (run,) = cli.sweep.runs().values()
    assert (float(run.varies["train.lr"]), run.varies["train.clip"]) == (0.00012345, "0.4375")
    assert run.varies["train.ema"] in [f"0.{i}" for i in range(1, 8)]
    assert "train.lr=0.00012345 train.clip=0.4375" in summary(cli.sweep)[0]
    study = import_optuna().load_study(**study_location(cli.sweep))
    live = study.ask(distributions(over))
    live.set_user_attr("run", "r")
    write_search(cli, base=BASE | {"route": "none"}, search={"over": {"train.lr": [0.5]}})
    text = cli("launch", "cluster=debug", code=2)
    assert "its search differs from that of its stored trials (trial 0 has train.lr=0.0001" in text
    assert [t[2] for t in trials(cli)] == ["complete", "running"]


def test_a_missing_optuna_is_one_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert sweeps_command.main(["launch", "search_route", "cluster=debug", f"paths.runs={tmp_path}"]) == 2
    assert "pip install 'optuna>=4'" in capsys.readouterr().err


def test_a_search_that_was_cut_off_before_its_study_has_no_trials(tmp_path):
    journal = tmp_path / ".sweeps" / "g" / "search" / "journal.log"
    journal.parent.mkdir(parents=True)
    journal.write_text('{"op_code": 0, "wor')
    assert summary(Sweep(tmp_path, "g")) == []


@pytest.mark.parametrize(
    ("damage", "kept"),
    [
        (lambda log: log[:-20], 3),
        (lambda log: log + b"\0" * 300, 3),
        (lambda log: log + b"\0" * 300 + b"\n", 3),
        (lambda log: log[:-20] + b"\n" + log.splitlines(keepends=True)[-1], 3),
        (lambda log: log + b"\n", 3),
        (lambda log: log[: log.index(b"\n") // 2], 0),
    ],
    ids=["cut", "NULs", "NULs and newline", "half a line and more", "empty line", "half of the first line"],
)
def test_a_journal_that_a_kill_cut_ends_no_search(damage, kept, tmp_path):
    sweep = Sweep(tmp_path, "g")
    journal = sweep.path / "search" / "journal.log"
    journal.parent.mkdir(parents=True)
    space = distributions({"train.lr": {"low": 0.1, "high": 1.0}})
    with open_study(sweep, "fd", space) as study:
        for value in (3.0, 2.0, 1.0):
            study.tell(study.ask(space), value)
    journal.write_bytes(damage(journal.read_bytes()))
    summary(sweep)  # `status` reads it too, and changes nothing
    with open_study(sweep, "fd", space) as study:
        assert len(study.trials) == kept
        study.tell(study.ask(space), 0.5)
    assert len([line for line in summary(sweep) if line.startswith("trial")]) == kept + 1
