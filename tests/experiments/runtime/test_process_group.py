"""A process group that is left over in the environment, or set by half, stops every command."""

from __future__ import annotations

import pytest

from experiments import run
from experiments.runtime.command import run_command
from experiments.runtime.process_group import MPI_SIZES, REQUIRED, ProcessGroup, process_group
from routing.errors import UserError

TORCHRUN = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
SECOND_OF_TWO = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", **TORCHRUN}


def of(monkeypatch, **environment):
    for name in (*REQUIRED, *MPI_SIZES, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return process_group()


def test_consistent_environments(monkeypatch):
    single = {"RANK": "0", "WORLD_SIZE": "1"}
    assert of(monkeypatch) == of(monkeypatch, RANK="0") == ProcessGroup()
    assert of(monkeypatch, **single, PMI_SIZE="1") == ProcessGroup()
    assert of(monkeypatch, **TORCHRUN, **single, LOCAL_RANK="0") == ProcessGroup()  # torchrun with one process
    # The second process of the second of two nodes, where srun started one torchrun each.
    last = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "PMI_SIZE": "2"}
    assert of(monkeypatch, **TORCHRUN, **last) == ProcessGroup(3, 4, 1)


def test_inconsistent_environments(monkeypatch):
    cases = [
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 without RANK, LOCAL_RANK"),
        ({"RANK": "3"}, "RANK=3 with WORLD_SIZE not set"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE='' .expected a whole number, 1 or more"),
        ({**SECOND_OF_TWO, "LOCAL_RANK": "2"}, "LOCAL_RANK=2 with"),
        ({**SECOND_OF_TWO, "MASTER_ADDR": "nohost.invalid"}, "MASTER_ADDR='nohost.invalid' .expected the name or addr"),
        ({"LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE=2 with WORLD_SIZE not set"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=4 .from MPI or srun."),
    ]
    for environment, problem in cases:
        with pytest.raises(UserError, match=f"the environment has {problem}.*torchrun"):
            of(monkeypatch, **environment)


def test_a_command_stops_with_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert run_command(run.main, ["dry=true", f"paths.runs={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: the environment has WORLD_SIZE=4 without RANK") and error.count("\n") == 1
