"""The last lines of a run: times, and commands that work as they are printed."""

import json
import shlex

from small import ROOT

from experiments.config.compose import load
from experiments.runtime.console import Console
from experiments.training.summary import show_results


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
