"""What a finished run prints last: the command that goes on from it works where it is typed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from experiments.training.summary import _sample_command


def test_the_next_command_names_a_python_that_has_the_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _sample_command() == "python -m experiments.sample"  # installed, without a checkout
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "sample.py").touch()
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", "/usr/bin")  # after `make demo`
    assert _sample_command() == ".venv/bin/python experiments/sample.py"
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin")  # activated
    assert _sample_command() == "python experiments/sample.py"
    monkeypatch.setattr(sys, "executable", "/opt/conda/bin/python")  # another environment
    assert _sample_command() == "python experiments/sample.py"
