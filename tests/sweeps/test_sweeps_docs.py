"""What docs/grids.md and docs/cluster.md show is what the commands take: each example as a dry run."""

import re

import pytest
from documents import ROOT, blocks

from sweeps import command as sweeps_command

GRIDS, CLUSTERS = ROOT / "docs" / "grids.md", ROOT / "docs" / "cluster.md"


@pytest.mark.parametrize("text", blocks(GRIDS, "yaml"))
def test_worked_grids_make_the_runs_that_they_say(text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (command, runs), name = text.splitlines()[0].split(" " * 6), re.search(r"(\w+).yaml", text)[1]
    (tmp_path / f"{name}.yaml").write_text(text)
    assert sweeps_command.main(command.split()[4:]) == 0
    by_path = capsys.readouterr().out
    made, waiting = [*re.findall(r"\d+", runs), "0"][:2]
    assert re.search(rf"\n{made} runs on cluster=\w+, {waiting} of them after others; nothing was", by_path)
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
        said = capsys.readouterr().out
        assert scale == "tiny" or [line for line in SCRIPTS[part] if line not in said] == []
