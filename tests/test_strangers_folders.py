"""A folder of runs from somebody else: links in it are refused, and its texts do not steer the terminal."""

from __future__ import annotations

import json
import os

import pytest
import yaml
from slurm_lab import make_run, note_submission
from small import overrides, small

from analysis import command as analysis_command
from experiments import evaluate, export, run, sample
from experiments.runtime.command import run_command
from experiments.runtime.console import printable
from sweeps import command as sweeps_command
from sweeps.store.folder import Sweep


@pytest.fixture
def outside(tmp_path):
    """A folder that nobody may change: `links` makes links to it or its file; `unchanged` says whether it is the same."""
    folder = tmp_path / "outside"
    (folder / "step-00000003").mkdir(parents=True)
    for name in ("file", "step-00000003/state.json", ".step-0", "shard-00000.npz", "final.png"):
        (folder / name).write_text("precious")
    yield folder
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == [
        ".step-0", "file", "final.png", "shard-00000.npz", "state.json",
    ]  # fmt: skip
    assert {path.read_text() for path in folder.rglob("*") if path.is_file()} == {"precious"}


def plant(path, outside):
    """Put a link in the place of a file or folder, which is moved out of the way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        path.rename(path.with_name("moved"))
    path.symlink_to(outside / "file" if path.suffix or path.name == "lock" else outside)


IN_RUN = [
    "config.yaml", "env.json", "summary.json", "status.json", "metrics.jsonl", "scores.jsonl", "lock", "model.safetensors", "loss.png",
    "checkpoints", "checkpoints/step-00000003", "checkpoints/.step-00000003.tmp1", "samples", "samples/final.png", "evaluations",
    "evaluations/samples", "evaluations/samples/shard-00000.npz",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A trained run, for all tests of its links."""
    runs = tmp_path_factory.mktemp("runs")
    assert run.main(overrides(runs)) == 0
    return small(runs).folder


def refused(main, words, capsys):
    """Run a command that has to refuse a link in one sentence."""
    capsys.readouterr()
    assert run_command(main, [str(word) for word in words]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ") and " is a link to " in line
    return line


@pytest.mark.parametrize("name", IN_RUN)
def test_a_link_in_a_run_folder_is_refused_by_all_that_write_there(name, trained, outside, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plant(trained / name, outside)
    try:
        commands = [
            (run.main, overrides(trained.parent, "train.steps=9")), (sample.main, [trained, "--seeds", "0-1"]),
            (evaluate.main, [trained, "--samples", "20"]), (export.main, [trained, "x.safetensors"]),
        ]  # fmt: skip
        for main, words in commands:
            assert name in refused(main, words, capsys)
    finally:
        (trained / name).unlink()
        moved = (trained / name).with_name("moved")
        if moved.exists():
            moved.rename(trained / name)
    assert not os.path.exists("x.safetensors") and not os.path.exists("samples/samples.npz")


def test_a_run_folder_that_is_a_link_is_refused_and_a_link_of_the_users_own_is_not(trained, outside, tmp_path, capsys):
    (trained / "notes").symlink_to(outside)
    assert run.main(overrides(trained.parent, "train.steps=6")) == 0
    (trained / "notes").unlink()
    config = small(tmp_path / "runs")
    plant(config.folder, outside)
    assert config.name in refused(run.main, overrides(tmp_path / "runs"), capsys)


@pytest.mark.parametrize("name", ["shards", "samples.npz", "grid.png"])
def test_a_link_in_the_folder_of_samples_is_refused(name, trained, outside, tmp_path, capsys):
    plant(tmp_path / "samples" / name, outside)
    refused(sample.main, [trained, "--seeds", "0-1", "--out", tmp_path / "samples"], capsys)


IN_SWEEP = [
    "", "lock", "count", "count/sweep.json", "count/batches.jsonl", "count/attempts", "count/attempts/{run}.jsonl", "count/logs",
    "count/logs/x.out", "count/launches", "count/pools", "count/pools/count.12345678", "count/outputs", "count/outputs/x.json",
    "count/done", "count/resolved/{run}.json", "count/search", "count/search/journal.log",
]  # fmt: skip


@pytest.mark.parametrize("name", IN_SWEEP)
def test_a_link_in_the_folder_of_a_sweep_is_refused(name, outside, tmp_path, capsys):
    runs = tmp_path / "runs"
    grid = tmp_path / "count.yaml"
    grid.write_text("base: {data: digits, train.steps: 2}\n")
    planned = make_run(runs)
    Sweep(runs, "count").add("Count", [planned])
    plant(runs / ".sweeps" / name.format(run=planned.name), outside)
    root = f"paths.runs={runs}"
    if name not in ("count", "", "count/sweep.json"):
        for words in (["status", "count", root], ["cancel", "count", root], ["show", "count", "--run", "r", root]):
            refused(sweeps_command.main, words, capsys)
    for words in (["cluster=debug"], ["cluster=local"], ["cluster=debug", "--retry"]):
        refused(sweeps_command.main, ["launch", grid, root, *words], capsys)
    sweeps_command.main(["status", root])
    sweeps_command.main(["list", root])


# --- what reaches the terminal -----------------------------------------------------------------------------------

EVIL = "\x1b]0;title\x07\x1b[2J\x1b[31mred\x9b5n\x08\r\x00end"


def no_controls(text):
    return not [c for c in text if c != "\n" and (ord(c) < 32 or 127 <= ord(c) < 160)]


def test_sequences_of_records_and_logs_do_not_reach_the_terminal(tmp_path, capsys):
    runs = tmp_path / "runs"
    sweep, planned = Sweep(runs, "count"), make_run(runs, label=EVIL, varies={"seed": EVIL}, args=[f"a={EVIL}"])
    sweep.add(EVIL, [planned])
    note_submission(sweep, "count.12345678", {"r": "18"})
    sweep.note("r", "start", batch="count.12345678", code=EVIL, host=EVIL)
    sweep.note("r", "end", how="failed", rank=0, error=EVIL, where=EVIL, signal=EVIL, job="18")
    summary = {"status": "done", "step": 10, "scores": {EVIL: 1.0}, "name": EVIL, "images_per_s": 1}
    for name in ("r", f"r{EVIL.replace(chr(0), '')}"):
        (runs / name).mkdir()
        (runs / name / "summary.json").write_text(json.dumps(summary))
        (runs / name / "config.yaml").write_text(yaml.safe_dump({"backbone": {"name": EVIL}, "seed": EVIL}))
        (runs / name / "env.json").write_text(json.dumps({"snapshot": EVIL, "git": EVIL}))
    root = f"paths.runs={runs}"
    for words in (
        ["status", "count", root], ["status", root], ["list", root], ["show", "count", "--run", "r", root], ["cancel", "count", root],
        ["status", "count", "--json", root],
    ):  # fmt: skip
        sweeps_command.main(words)
        printed = capsys.readouterr()
        assert printed.out + printed.err and no_controls(printed.out + printed.err), words
    for words in (["list", runs], ["tables", runs, "--print"], ["compare", runs / "r", runs / "r"]):
        analysis_command.main([str(word) for word in words])
        printed = capsys.readouterr()
        assert no_controls(printed.out + printed.err), words


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"), ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"), ("a\x07\x08b\x7f\x9b", "ab"),
        ("two\nlines\tof text", "two\nlines\tof text"), ("dit ± 0.5 日本 \U0001f600", "dit ± 0.5 日本 \U0001f600"), ("\x1b", ""),
    ],
)  # fmt: skip
def test_printable_leaves_what_a_terminal_shows(text, shown):
    assert printable(text) == shown


@pytest.mark.parametrize("name", ["a\nb", "a\rb", "a\x1b[2Jb", "a\tb"])
def test_a_folder_of_runs_whose_name_would_break_a_line_of_a_script_is_refused(name, tmp_path, capsys):
    for words in (["launch", "selection_rate", "cluster=slurm", "--dry-run"], ["status"], ["cancel", "x"]):
        assert sweeps_command.main([*words, f"paths.runs='{tmp_path / name}'"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "expected a path without control characters" in line and no_controls(line)
