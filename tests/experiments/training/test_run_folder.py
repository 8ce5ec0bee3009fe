"""A run folder that disappears while its run trains."""

from __future__ import annotations

import shutil

import pytest
from small import small

from experiments.runtime import checkpoint_files, signals
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
    [(_rename, "step"), (shutil.rmtree, "last evaluation"), (_replace, "save"), (_rename, "signal")],
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
