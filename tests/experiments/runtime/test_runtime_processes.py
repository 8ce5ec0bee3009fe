"""Processes that share work end in order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from slurm_lab import free_ports

_SCRIPT = """
import sys
from experiments.runtime.processes import gather, join, share, world
join("cpu")
rank, size = world()
assert size == 2 and gather(rank) == [0, 1] and len(share(7)) == 3 + rank
print("joined")
sys.exit(3)
"""


@pytest.mark.slow
def test_processes_end_with_their_own_code_right_behind_a_collective_call() -> None:
    # Gloo's threads aborted one in three while Python was finalised.
    first = free_ports(3)
    for port in range(first, first + 3):
        shared = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[3]),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "CUDA_VISIBLE_DEVICES": "",
        }
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", _SCRIPT],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(2)
        ]
        for process in ranks:
            said, complained = process.communicate(timeout=120)
            assert (said, process.returncode) == ("joined\n", 3), complained[-2000:]
