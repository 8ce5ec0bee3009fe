"""Processes that share work end in order."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from slurm_lab import free_ports
from small import ROOT

_SCRIPT = """
import sys
from experiments.runtime.processes import gather, join, share, world
join("cpu")
rank, size = world()
assert size == 2 and gather(rank) == [0, 1] and len(share(7)) == 3 + rank
print("joined")
sys.exit(3)
"""


def start(rank, port):
    group = {"WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **group}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", _SCRIPT], stdout=pipe, stderr=pipe, text=True, env=env)


@pytest.mark.slow
def test_processes_end_with_their_own_code_right_behind_a_collective_call():
    # Gloo's threads aborted one in three while Python was finalised.
    first = free_ports(3)
    for port in range(first, first + 3):
        for process in [start(rank, str(port)) for rank in "01"]:
            output, errors = process.communicate(timeout=120)
            assert (output, process.returncode) == ("joined\n", 3), errors[-2000:]
