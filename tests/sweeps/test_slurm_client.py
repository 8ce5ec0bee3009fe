"""Calls of Slurm's commands and what their answers mean, without a cluster."""

import os

import pytest

from sweeps import SweepError
from sweeps.jobs import job_end, slurm


def test_a_missing_configuration_of_slurm_is_refused_at_once(monkeypatch, tmp_path):
    """`scontrol` itself tries for a minute; the command must not be started at all."""
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    with pytest.raises(SweepError, match="SLURM_CONF=.*slurm.conf: no such file"):
        slurm.call(["touch", str(tmp_path / "started")])
    assert not (tmp_path / "started").exists()


def test_clients_without_a_cluster_say_where_to_go(tmp_path, monkeypatch):
    client = tmp_path / "squeue"
    client.write_text("#!/bin/sh\necho 'squeue: error: Unable to contact slurm controller' >&2; exit 1\n")
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SweepError, match="squeue: .*Unable to contact.*cluster=local"):
        slurm.queue()


def test_accounting_is_asked_for_numbers_alone(monkeypatch):
    asked = []
    monkeypatch.setattr(slurm, "call", lambda words: asked.append(words[-1]) or "7_1|FAILED|1:0|n1\n")
    assert slurm.history(["x_1", "7_1", "7_2", ""])["7_1"].exit == "1:0" and asked == ["7"]
    assert slurm.history(["x_1"]) == {} and asked == ["7"]


MEMORY = "out of memory (cluster.memory_gb= asks for more)"


@pytest.mark.parametrize(
    ("state", "code", "log", "reason"),
    [
        ("FAILED", "0:9", "", "killed by signal 9 (out of memory?)"),
        ("FAILED", "0:9", "srun: error: n1: task 0: Killed\nsrun: more", "killed by signal 9 (out of memory?)"),
        ("FAILED", "", "srun: error: n1: tasks 0-3: Segmentation fault (core dumped)", "Segmentation fault"),
        ("FAILED", "11:0", "", "FAILED with exit code 11"),
        ("NODE_FAIL", "0:0", "", "its node failed"),
        ("TIMEOUT", "0:0", "", "reached its time limit before it had saved (cluster.time=, cluster.signal_s=)"),
        ("", "", "", "its job is gone"),
        ("OUT_OF_MEMORY", "0:9", "", MEMORY),
        ("FAILED", "0:9", "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the", MEMORY),
        ("FAILED", "0:9", "srun: error: n1: task 0: Out Of Memory", MEMORY),
        ("FAILED", "0:9", "slurmstepd: error: StepId=7.0 exceeded memory limit (9 > 4), being killed", MEMORY),
    ],
)
def test_what_ended_a_job(state, code, log, reason):
    job = slurm.QueueJob("7", state, exit=code)
    assert job_end.end_reason(job, log) == reason
    assert job_end.memory_ran_out(job, log) == (reason == MEMORY)
