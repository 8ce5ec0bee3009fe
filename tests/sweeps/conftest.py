"""Fixtures of the sweep tests: the commands on stub runs in a folder of their own."""

from types import SimpleNamespace

import pytest
from slurm_lab import STUB, Launcher, lab, named_nodes, on_cluster, use_stubs  # noqa: F401

from sweeps.jobs import sbatch, slurm
from sweeps.status import status


@pytest.fixture
def stubs(monkeypatch):
    """Let grids name the modules `stub_training` and `stub_command`, here and in processes that are started."""
    monkeypatch.syspath_prepend(str(STUB))
    use_stubs(monkeypatch)


@pytest.fixture
def cli(request, stubs, tmp_path, capsys, monkeypatch):
    """`cli(COMMAND, WORDS...)`: a command on a grid of two runs (marked `slurm`: four, on the cluster); its output."""
    if request.node.get_closest_marker("slurm"):
        yield from on_cluster(request.getfixturevalue("lab"), tmp_path, capsys, monkeypatch)
    else:
        yield Launcher(tmp_path, capsys)


@pytest.fixture
def answers(monkeypatch):
    """What Slurm's commands answer: jobs by id in `queue` and `history`, the longest array; other `calls` are kept."""
    answers = SimpleNamespace(queue={}, history={}, max_array=1001, calls=[])
    monkeypatch.setattr(slurm, "queue", lambda *_: answers.queue)
    monkeypatch.setattr(slurm, "history", lambda *_: answers.history)
    monkeypatch.setattr(status, "launch_of", lambda *_: "ours")
    monkeypatch.setattr(slurm, "max_array", lambda *_: answers.max_array)
    monkeypatch.setattr(slurm, "call", lambda words: answers.calls.append(words) or "")
    return answers


@pytest.fixture
def submissions(answers, monkeypatch):
    """The arrays that were handed to sbatch. The tasks of the first have the ids 1_0, 1_1, ...; no job is in the queue."""
    submissions = []

    def submit(_sweep, runs, resources, batch, after, _dependencies):
        submissions.append(SimpleNamespace(runs=runs, resources=resources, batch=batch, after=after))
        ids = {}
        for index, names in enumerate(batch.tasks()):
            ids |= dict.fromkeys(names, f"{len(submissions)}_{index}")
        return ids

    monkeypatch.setattr(sbatch, "submit", submit)
    return submissions
