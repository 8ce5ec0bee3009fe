"""A dry run of a sweep: what a launch would submit now, what it would refuse, and what the examples in docs/ make."""

import re

import pytest
from documents import ROOT, blocks
from slurm_lab import note_submission, silent, write_grid

from routing.errors import UserError
from sweeps import command as sweeps_command
from sweeps.jobs import slurm
from sweeps.plan import plan, preflight

GRIDS, CLUSTERS = ROOT / "docs" / "grids.md", ROOT / "docs" / "cluster.md"


def test_a_dry_run_leaves_out_what_is_finished_or_queued(cli, answers, monkeypatch):
    cli.grid = write_grid(cli.folder, seeds=[0, 1, 2])
    text = cli("launch", "--dry-run")
    assert "3 runs on cluster=slurm" in text and "--array=0-2" in text
    assert not cli.sweep.path.exists()
    cli("launch", "cluster=debug", "seed=0")
    text = cli("launch", "--dry-run")
    assert "1 of 3 done" in text and "2 runs on cluster=slurm" in text and "--array=0-1" in text
    assert "_s0-" not in text and text.count("20 steps") == 2
    # It has fewer steps than are wanted now, and is in the queue for them.
    note_submission(cli.sweep, "count.bbbbbbbb", {cli.rows()[0].run.name: "18"})
    answers.queue["18"] = slurm.QueueJob("18", "PENDING", name="count.bbbbbbbb")
    text = cli("launch", "--dry-run", "train.steps=30")
    assert "1 of 3 in the queue or running" in text and "2 runs on" in text
    monkeypatch.setattr(slurm, "queue", silent)
    text = cli("launch", "--dry-run", "train.steps=30")
    assert "squeue gave no answer; what was submitted earlier counts as in the queue or running" in text
    assert "2 runs on cluster=slurm" in text
    assert "which runs are live is unknown" in cli("launch", "cluster=slurm", "train.steps=30", code=2)


def test_what_the_first_cell_lacks_is_said_before_the_others_are_composed(cli, monkeypatch):
    def refuse(*_):
        raise UserError("no data")

    composed = []
    honest = plan.load
    monkeypatch.setattr(plan, "load", lambda words: composed.append(1) or honest(words))
    monkeypatch.setattr(preflight, "check_ready", refuse)
    assert "error: no data" in cli("launch", "cluster=debug", code=2) and len(composed) == 1
    assert not cli.sweep.path.exists()
    # A dry run says it once, and goes on, so that the cost can be looked at.
    text = cli("launch", "--dry-run", code=2)
    assert text.count("error: no data") == 1 and "2 runs on cluster=slurm" in text and "\ntogether:" in text


def test_a_plan_of_many_runs_shows_how_far_it_is(cli, monkeypatch):
    from experiments.runtime import console

    monkeypatch.setattr(console, "PLAIN_EVERY_S", (0.0, 0.0))
    monkeypatch.setattr(console, "_PLAIN_CHECK_S", 0.01)
    assert "checking" not in cli("launch", "--dry-run")
    cli.grid = write_grid(cli.folder, seeds=list(range(120)))
    text = cli("launch", "--dry-run", "cluster=debug")
    assert re.search(r"checking the runs \d+%  \[", text) and re.search(r"counting their cost \d+%  \[", text)


# --- the examples of docs/grids.md and docs/cluster.md ------------------------------------------------------------


@pytest.mark.parametrize("text", blocks(GRIDS, "yaml"))
def test_worked_grids_make_the_runs_that_they_say(text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (command, runs), name = text.splitlines()[0].split(" " * 6), re.search(r"(\w+).yaml", text)[1]
    (tmp_path / f"{name}.yaml").write_text(text)
    assert sweeps_command.main(command.split()[4:]) == 0
    by_path = capsys.readouterr().out
    run_count, waiting = [*re.findall(r"\d+", runs), "0"][:2]
    assert re.search(rf"\n{run_count} runs on cluster=\w+, {waiting} of them after others; nothing was", by_path)
    assert sweeps_command.main(["launch", name, "--dry-run"]) == 0
    assert capsys.readouterr().out == by_path and len(list(tmp_path.iterdir())) == 1


# Of each example of a cluster: what its script has, by a part of the example.
SCRIPTS = {
    "module load": ["--gpus-per-node=4", "module load cuda/12.4\n", "|| exit 1\n", " python -u -m submitit"],
    "a100:2": ["--account=diffusion", "--qos=long", "--gpus-per-node=a100:2", "--mem-per-gpu=64G", "--exclusive=user"],
    "sqsh": ["--gpus-per-node=8", " --container-image=/images/tread.sqsh --container-mounts=/home", " python -u -m"],
    "apptainer": ["--ntasks-per-node=8", " apptainer exec --nv --bind /home/me/tread,/data /images/tread.sif python -u"],
}  # fmt: skip


@pytest.mark.parametrize("part", SCRIPTS)
def test_example_clusters_make_the_script_that_they_say(part, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (text,) = (block for block in blocks(CLUSTERS, "yaml") if part in block)
    (tmp_path / "mine.yaml").write_text(text)
    for scale in ("paper", "tiny"):
        words = ["launch", "selection_rate", "cluster=mine", f"scale={scale}", "data=scenes", "--dry-run"]
        assert sweeps_command.main(words) == 0, capsys.readouterr().err
        output = capsys.readouterr().out
        assert scale == "tiny" or [line for line in SCRIPTS[part] if line not in output] == []
