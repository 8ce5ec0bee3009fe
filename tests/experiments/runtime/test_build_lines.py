"""Every command that computes on a CPU says so while it builds the CPU kernels."""

from __future__ import annotations

import pytest
import torch
from small import ROOT, overrides

from backbones.ops import native
from experiments import bench, run, sample
from experiments.benchmark import block_times

LINE = "building the CPU kernels, once for this machine ..."


@pytest.fixture(autouse=True)
def no_library_yet(monkeypatch):
    """As on a machine without the built library; the build itself is left out."""

    def load():
        native.REPORT(LINE)
        return False, "left out by a test"

    monkeypatch.setattr(native, "ACTIVE", native.Implementations())
    monkeypatch.setattr(native, "REPORT", native.REPORT)
    monkeypatch.setattr(native, "_load", load)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("name", ["run", "sample", "bench"])
def test_the_build_of_the_kernels_is_shown(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(block_times, "VALUES", 1 << 10)
    weights = str(ROOT / "results/models/dit_2-8.safetensors")
    commands = {
        "run": (run.main, overrides(tmp_path, "train.steps=1", "sampler.steps=1")),
        "sample": (sample.main, [weights, "--seeds", "0", "--steps", "1", "--out", str(tmp_path / "out")]),
        "bench": (bench.main, [
            "size=T/2", "backbone=dit", "device=cpu", "parts=blocks", "block_tokens=16", "rounds=1",
            f"out={tmp_path / 'bench.json'}",
        ]),
    }  # fmt: skip
    main, words = commands[name]
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines().count(LINE) == 1
