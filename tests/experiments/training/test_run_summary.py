"""The last lines of a run: times, and commands that work as they are printed."""

import contextlib
import json
import shlex
import sys

import pytest
from matplotlib.figure import Figure
from small import ROOT, small

from experiments.config.compose import load
from experiments.runtime import run_folder
from experiments.runtime.console import Console
from experiments.training.divergence import has_diverged
from experiments.training.run_end import moving_average
from experiments.training.session import train
from experiments.training.summary import read_summary, show_results


def test_a_routed_run_ends_with_commands_that_sample_and_compare_with_its_dense_baseline(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ["backbone=dit", "data=digits", "train.steps=20", "eval.samples=60", f"paths.runs={tmp_path / 'r u n s'}"]
    config, dense = load([*words, "route=2-8"]), load([*words, "route=none"])
    summary = {"status": "done", "name": config.name, "step": 20, "wall_s": 83, "session_s": 163.5, "scores": {}}
    for folder in (config.folder, dense.folder):
        folder.mkdir(parents=True)
    (config.folder / "summary.json").write_text(json.dumps(summary))
    show_results(Console(), config, [*words, "route=2-8"], {"preview": [], "scores": [100.0, 30.0]})
    printed = capsys.readouterr().out
    assert "total       2:43 since start: scores 2:10\ntraining    1:23 for 20 steps\n" in printed
    text = printed.partition("docs/tutorial.md:\n")[2].replace("\ncompare  ", "\n#").replace(" \\\n", " ")
    commands = shlex.split(text, comments=True)
    sample, run, analysis = (commands.index(name) for name in ("experiments/sample.py", "experiments/run.py", "analysis"))
    assert commands[sample + 1 : sample + 3] == [str(config.folder), f"--out={config.folder / 'samples-20'}"]
    assert load(commands[run + 1 : analysis - 2]).folder == dense.folder
    assert commands[analysis + 1 :] == ["compare", str(dense.folder), str(config.folder)]
    (dense.folder / "summary.json").write_text(json.dumps(summary | {"name": dense.name}))
    show_results(Console(), config)
    printed = capsys.readouterr().out
    assert "total" not in printed and "experiments/run.py" not in printed and "analysis compare" in printed
    show_results(Console(), dense)
    assert "compare" not in capsys.readouterr().out
    sparse = load([*words, "route=2-8", "guidance=routed"])  # a dense run has no route for the guidance
    sparse.folder.mkdir()
    (sparse.folder / "summary.json").write_text(json.dumps(summary | {"name": sparse.name}))
    show_results(Console(), sparse)
    assert "compare" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("module", "error"),
    [
        ("matplotlib.figure", None),  # cannot be imported
        (None, ValueError("Key backend: 'module://ipympl' is not a valid value")),
        (None, RuntimeError("latex could not be found")),
        (None, OSError(28, "No space left on device")),
        (None, KeyboardInterrupt()),  # a second Ctrl-C
    ],
    ids=["import", "backend", "latex", "full disk", "Ctrl-C"],
)
def test_a_picture_that_cannot_be_drawn_leaves_a_finished_run_done(module, error, tmp_path, capsys, monkeypatch):
    def fail(*_, **__):
        raise error

    if module:
        monkeypatch.setitem(sys.modules, module, None)
    else:
        monkeypatch.setattr(Figure, "savefig", fail)
    config = small(tmp_path)
    with pytest.raises(KeyboardInterrupt) if isinstance(error, KeyboardInterrupt) else contextlib.nullcontext():
        train(config)
        assert "loss.png could not be drawn" in capsys.readouterr().out
    summary = read_summary(config.folder)
    assert summary["step"] == 6 and "loss_curve" not in summary
    assert json.loads((config.folder / "status.json").read_text())["status"] == "done"
    train(config)
    assert "done already" in capsys.readouterr().out


def test_the_moving_average_of_losses_starts_without_excess_of_the_first():
    assert moving_average([5.0] * 4) == pytest.approx([5.0] * 4)
    assert moving_average([9.0, 1.0])[1] == pytest.approx((0.7 * 9 + 1) / 1.7)


@pytest.mark.parametrize(
    ("losses", "least", "diverged"),
    [
        ([1.0, 0.9, 0.5], 0.0, False),
        ([1.0, 1.2], 0.0, False),
        ([0.3, 1.0], 0.0, False),  # the first steps of a fine-tune
        ([1.0, 1e7], 0.0, True),
        ([1.0, None], 0.0, True),
        ([None, 0.9], 0.0, False),
        ([-0.4, -0.3], -0.5, False),
        ([-0.4, 0.1], -0.5, True),
        ([], 0.0, False),  # shorter than the interval of the lines
    ],
)
def test_a_run_whose_loss_has_grown_or_is_not_finite_has_diverged(losses, least, diverged):
    assert has_diverged(losses, least) == diverged


def test_a_diverged_run_ends_with_a_mark(tmp_path, capsys):
    folder = train(small(tmp_path, "train.lr=1", "train.warmup=0", "train.steps=16"))
    assert json.loads((folder / "summary.json").read_text())["diverged"] is True
    assert "\ndiverged    the loss has grown or is not finite" in capsys.readouterr().out
    assert run_folder.diverged(folder) and not run_folder.diverged(tmp_path)
