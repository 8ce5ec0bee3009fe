"""Fixtures of the sweep tests: the commands on stub runs in a folder of their own."""

import pytest
from slurm_lab import STUB, Launcher, lab, named_nodes, on_cluster, use_stubs  # noqa: F401


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
