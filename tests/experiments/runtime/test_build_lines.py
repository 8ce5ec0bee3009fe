"""Every command that computes on a CPU says so while it builds the CPU kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small import overrides, small

from backbones.ops import native
from experiments import bench, components, run, sample
from experiments.evaluation import trained_model

LINE = "building the CPU kernels, once for this machine ..."


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Exported weights of an untrained model."""
    config = small(tmp_path / "none", "route=1-2", "eval=digits", "eval.samples=20", "sampler.steps=2")
    info = components.describe_data(components.make_dataset(config))
    model = components.make_model(config, info)
    path = tmp_path / "model.safetensors"
    trained_model.export(path, model, model.state_dict(), config, 7, info)
    return path


@pytest.fixture
def no_library_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without the built library; the build itself is left out."""

    def load() -> tuple[bool, str]:
        native.REPORT(LINE)
        return False, "left out by a test"

    monkeypatch.setattr(native, "ACTIVE", native.Implementations())
    monkeypatch.setattr(native, "REPORT", native.REPORT)
    monkeypatch.setattr(native, "_load", load)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("name", ["run", "sample", "bench"])
def test_the_build_of_the_kernels_is_shown(
    name: str, weights: Path, tmp_path: Path, no_library_yet: None, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    commands = {
        "run": (run.main, overrides(tmp_path, "train.steps=1", "sampler.steps=1")),
        "sample": (sample.main, [str(weights), "--seeds", "0", "--out", out]),
        "bench": (bench.main, [
            "size=T/2", "tokens=16", "depth=4", "route=1-2", "batch=2", "rounds=1", "block_tokens=16",
            "backbone=dit", "device=cpu", "parts=blocks", f"out={out}.json",
        ]),
    }  # fmt: skip
    command, words = commands[name]
    assert command(words) == 0
    assert capsys.readouterr().out.splitlines().count(LINE) == 1
