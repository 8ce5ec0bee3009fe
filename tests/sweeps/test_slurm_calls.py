"""Calls of Slurm's commands: what is refused before Slurm would try for a minute."""

import pytest

from sweeps import SweepError
from sweeps.jobs import slurm


def test_a_missing_configuration_of_slurm_is_refused_at_once(monkeypatch, tmp_path):
    """`scontrol` itself tries for a minute; the command must not be started at all."""
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    command = ["touch", str(tmp_path / "started")]
    with pytest.raises(SweepError, match="SLURM_CONF=.*slurm.conf: no such file"):
        slurm.call(command)
    assert not (tmp_path / "started").exists()
    monkeypatch.delenv("SLURM_CONF")
    assert slurm.call(command) == "" and (tmp_path / "started").exists()
