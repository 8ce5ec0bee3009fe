"""train.precision=auto: a rule by device, part of the name as `auto`, kept when a run is resumed."""

import json

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from small import small

import analysis
from experiments import components as build
from experiments.runtime import environment
from experiments.training import precision
from experiments.training.precision import resolve_precision
from experiments.training.session import train

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        ("flags : fpu avx2 avx512f avx512_bf16", "bf16"),
        ("flags : fpu avx512f amx_bf16 amx_tile", "bf16"),
        ("flags : fpu avx2 avx512f amx_int8", "fp32"),
        ("Features : fp asimd bf16", "fp32"),
    ],
)
def test_cpus_with_bf16_in_hardware_take_it(tmp_path, monkeypatch, flags, chosen):
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{flags}\n")
    monkeypatch.setattr(environment, "Path", lambda _: tmp_path / "cpuinfo")
    assert resolve_precision(small(tmp_path, "train.precision=auto"), CPU) == chosen
    warning = precision.slow_bf16(small(tmp_path, "train.precision=bf16"), CPU)
    assert warning is None if chosen == "bf16" else "neither AVX512-BF16 nor AMX" in warning


@pytest.mark.parametrize(("capability", "chosen"), [((7, 5), "fp32"), ((8, 0), "bf16"), ((9, 0), "bf16")])
def test_gpus_take_it_from_ampere_on(tmp_path, monkeypatch, capability, chosen):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert resolve_precision(small(tmp_path, "train.precision=auto"), CUDA) == chosen
    assert resolve_precision(small(tmp_path, "train.precision=fp32"), CUDA) == "fp32"
    assert resolve_precision(small(tmp_path, "train.precision=auto"), torch.device("mps")) == "fp32"


def test_a_run_keeps_what_auto_meant_where_it_first_started(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(precision, "has_bf16", lambda device: False)
    config = small(tmp_path, "train.precision=auto", "train.steps=2")
    folder = train(config)
    assert folder.name == config.name
    assert ", fp32 (train.precision=auto)" in capsys.readouterr().out
    assert yaml.safe_load((folder / "config.yaml").read_text())["train"]["precision"] == "auto"
    assert json.loads((folder / "precision.json").read_text())["precision"] == "fp32"
    assert analysis.load(tmp_path)["config.train.precision"].item() == "fp32"
    # Another machine resumes in the same precision.
    monkeypatch.setattr(precision, "has_bf16", lambda device: True)
    assert train(small(tmp_path, "train.precision=auto", "train.steps=4")) == folder
    assert json.loads((folder / "summary.json").read_text())["precision"] == "fp32"
    assert ", fp32 (train.precision=auto)" in capsys.readouterr().out


def test_the_precision_of_accelerates_own_configuration_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    AcceleratorState._reset_state()
    assert build.make_accelerator(small(tmp_path)).mixed_precision == "no"
