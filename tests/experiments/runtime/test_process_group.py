"""A process group that is left over in the environment, or set by half, stops every command."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from small import ROOT

from experiments.runtime.process_group import MPI_SIZES, REQUIRED, ProcessGroup, process_group
from routing.errors import UserError

TORCHRUN = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
SECOND_OF_TWO = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", **TORCHRUN}
COMMANDS = {
    "run": ["experiments/run.py", "dry=true"],
    "sweeps": ["-m", "sweeps", "list"],
    "analysis": ["-m", "analysis", "table", "nowhere"],
}


def of(monkeypatch, **environment):
    for name in (*REQUIRED, *MPI_SIZES, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return process_group()


@pytest.mark.parametrize(
    ("environment", "group"),
    [
        ({}, ProcessGroup()),
        ({"RANK": "0"}, ProcessGroup()),
        ({"RANK": "0", "WORLD_SIZE": "1", "PMI_SIZE": "1"}, ProcessGroup()),
        # torchrun with one process, and the second of the second of two nodes.
        ({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, ProcessGroup()),
        (
            {
                **TORCHRUN,
                "RANK": "3",
                "WORLD_SIZE": "4",
                "LOCAL_RANK": "1",
                "LOCAL_WORLD_SIZE": "2",
                "PMI_SIZE": "2",  # srun started one torchrun on each node
            },
            ProcessGroup(3, 4, 1),
        ),
    ],
)
def test_consistent_environments(monkeypatch, environment, group):
    assert of(monkeypatch, **environment) == group


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 without RANK, LOCAL_RANK"),
        ({"RANK": "3"}, "RANK=3 with WORLD_SIZE not set"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK=0 without RANK, WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE='' .expected a whole number, 1 or more"),
        ({"RANK": "-1"}, "RANK='-1'"),
        ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE='999"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0", **TORCHRUN}, "RANK=2 with WORLD"),
        ({**SECOND_OF_TWO, "LOCAL_RANK": "2"}, "LOCAL_RANK=2 with"),
        ({**SECOND_OF_TWO, "MASTER_PORT": "x"}, "MASTER_PORT='x' .expected a whole number, 1 to 65535"),
        (
            {**SECOND_OF_TWO, "MASTER_ADDR": "nohost.invalid"},
            "MASTER_ADDR='nohost.invalid' .expected the name or address of a host",
        ),
        ({"LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE=2 with WORLD_SIZE not set"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=4 .from MPI or srun."),
    ],
)
def test_inconsistent_environments(monkeypatch, environment, problem):
    with pytest.raises(UserError, match=f"the environment has {problem}.*torchrun"):
        of(monkeypatch, **environment)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_stops_with_one_sentence(tmp_path, command):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WORLD_SIZE": "4"}
    words = [str(ROOT / w) if w.endswith(".py") else w for w in COMMANDS[command]]
    done = subprocess.run([sys.executable, *words], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: the environment has WORLD_SIZE=4 without RANK")
    assert len(done.stderr.splitlines()) == 1 and not list(tmp_path.iterdir())
