"""The wheel holds what the checkout has, and works where no checkout is."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from small import ROOT, overrides

from experiments.runtime.errors import PACKAGES


def call(*words, **options):
    plain = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, timeout=300, env=plain, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_is_whole_and_its_commands_run_outside_the_checkout(tmp_path):
    tracked = call("git", "-C", ROOT, "ls-files", *PACKAGES, "pyproject.toml", "README.md", "LICENSE").split("\n")[:-1]
    for name in tracked:
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    call(*pip, "wheel", "--no-deps", "-w", tmp_path, tmp_path / "source")
    (wheel,) = tmp_path.glob("tread_suite-*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    left = {name for name in tracked if "/" in name and "notebooks/" not in name} - packed
    assert not left, f"not in the wheel: {', '.join(sorted(left))}"

    # Beside it the libraries of this environment, but not what it knows of the checkout.
    call(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    bin_, site = tmp_path / "venv/bin", Path(sysconfig.get_path("purelib", vars={"base": tmp_path / "venv"}))
    call(*pip, "--python", bin_ / "python", "install", "--no-deps", wheel)
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    away = {"cwd": elsewhere}
    assert str(site) in call(bin_ / "python", "-c", "import experiments; print(experiments.__file__)", **away)
    words = overrides(Path("runs"), "backbone=mamba", "route=1-2", "train.steps=2", "eval=digits")
    assert "model.safetensors" in call(bin_ / "python", "-m", "experiments.run", *words, **away)
    assert "done already" in call(bin_ / "tread-run", *words, **away)
    planned = call(bin_ / "tread-sweeps", "launch", "route_placement", "--dry-run", "cluster=debug", **away)
    assert str(site) not in planned
    call(bin_ / "python", "-m", "analysis", "report", "runs", **away)
