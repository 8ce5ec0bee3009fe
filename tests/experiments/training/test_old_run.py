"""A run that an earlier version began is resumed by this one, to the numbers that it would have had.

tests/data/old_run holds the folder of a run of eight steps as a kill after its sixth left it: one checkpoint, of step
4, written at commit f925416. `uninterrupted.jsonl` is the log of the same run without the kill, `command.txt` what was
typed. The folder is never written anew: that old checkpoints stay readable is the point.
"""

import json
import shutil

import pytest
from suite import DATA, train

OLD = DATA / "old_run"
# Keys that later versions do without: at their former default they say nothing and are accepted.
FORMER_DEFAULTS = ("sampler.reuse=null", "sampler.reuse_every=2", "routing.learned=none")


def words():
    return (OLD / "command.txt").read_text().split()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_checkpoint_of_an_earlier_version_is_resumed_to_the_same_end(tmp_path):
    shutil.copytree(OLD / "runs", tmp_path / "runs")
    folder = next((tmp_path / "runs").iterdir())
    assert train([*words(), *FORMER_DEFAULTS, f"paths.runs={tmp_path / 'runs'}"]) == folder
    assert list((tmp_path / "runs").iterdir()) == [folder]
    resumed, expected = lines(folder / "metrics.jsonl"), lines(OLD / "uninterrupted.jsonl")
    assert [line["step"] for line in resumed] == list(range(1, 9))
    for line, other in zip(resumed, expected, strict=True):
        # Float32 kernels for AVX2 and AVX-512 differed by at most 2e-7 in a loss (test_golden_losses).
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        assert (line["lr"], line["macs"]) == (other["lr"], other["macs"])
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["step"], summary["name"]) == ("done", 8, folder.name)
    assert summary["loss"] == pytest.approx(expected[-1]["loss"], rel=1e-5)
