"""A run folder that disappears while its run trains, and the time that a run says is left."""

from __future__ import annotations

import shutil
import time

import pytest
from small import small

from experiments.runtime import checkpoint_files, records, signals
from experiments.runtime.command import run_command
from experiments.training import run_evaluation as evaluation
from experiments.training.session import train
from experiments.training.step import TrainingStep


def _rename(folder):
    folder.rename(folder.with_name("renamed"))


def _replace(folder):
    """Another start of the same run, in a folder of the same name."""
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "config.yaml").write_text("")
    (folder / "lock").write_text('{"pid": 1, "host": "elsewhere"}')


@pytest.mark.parametrize(
    ("change", "moment"),
    [
        (_rename, "step"),
        (shutil.rmtree, "last evaluation"),
        (_replace, "save"),
        (_rename, "signal"),
    ],
)
def test_a_run_folder_that_is_gone_ends_the_run_with_an_error_and_is_not_made_again(
    change, moment, tmp_path, monkeypatch, capsys
):
    config = small(tmp_path, "train.sample_every=3", "train.log_every=1")
    target, name, at = {
        "step": (TrainingStep, "run", 1),
        "signal": (TrainingStep, "run", 1),
        "last evaluation": (evaluation.Evaluation, "_samples", 2),
        "save": (checkpoint_files, "save_tensors", 1),
    }[moment]
    honest, calls = getattr(target, name), []

    def spoil(*arguments, **options):
        calls.append(name)
        if len(calls) == at:
            change(config.folder)
            if moment == "signal":
                signals.request("SIGTERM")
        return honest(*arguments, **options)

    monkeypatch.setattr(target, name, spoil)
    assert run_command(lambda _: train(config, quiet=True) and 0, []) == 2
    error = capsys.readouterr().err
    assert "was deleted, renamed or replaced while" in error and error.count("\n") == 1
    left = {path.name for path in config.folder.glob("*")}
    assert left <= ({"config.yaml", "lock"} if change is _replace else set())


def test_the_time_left_covers_the_evaluations_before_the_first_and_after_it(tmp_path, monkeypatch):
    config = small(tmp_path, "train.sample_every=3", "train.log_every=1", "train.steps=9")
    seen, honest = {}, records.write_status

    def status(folder, state, **fields):
        if state == "running" and "eta_s" in fields:
            seen[fields["step"]] = fields["eta_s"]
        honest(folder, state, **fields)

    def slow(self):
        time.sleep(0.6)
        self.seconds[evaluation.PREVIEW].append(0.6)

    monkeypatch.setattr(records, "write_status", status)
    monkeypatch.setattr("experiments.training.run_evaluation.Evaluation._pictures", slow)
    costs = {evaluation.PREVIEW: 1e17, evaluation.FINAL: 0, evaluation.SCORES: 0}
    monkeypatch.setattr("experiments.training.run_evaluation.Evaluation._macs", costs)
    train(config, quiet=True)
    assert seen[2] > 100, "predicted from the multiply-accumulates"
    # At steps 6 and 9, where the one of this step is still to come: 0.6 s each.
    assert 1 <= seen[6] <= 4 and 1 <= seen[9] <= 2
