"""experiments/export.py: one file of half the bytes that every command opens by its path."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors import safe_open
from small import ROOT, small

from analysis import command
from backbones import Backbone
from experiments import components as build
from experiments import export, sample
from experiments.evaluation import trained_model
from experiments.runtime.command import run_command


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Weights of a run whose folders are somewhere on this machine."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("export")
    config = small(folder / "runs", "backbone=mamba", "route=1-2", f"paths.cache={folder}")
    info = build.describe_data(build.make_dataset(config))
    model = build.make_model(config, info)
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    path = folder / "model.safetensors"
    trained_model.export(path, model, model.state_dict(), config, 7, info)
    return path


def exported(source, out, *more):
    return run_command(export.main, [str(source), str(out), *more])


@pytest.fixture(scope="module")
def half(weights):
    out = weights.parent / "box" / "mamba_1-2.safetensors"
    assert exported(weights, out, "--half") == 0
    return out


def test_it_is_half_the_bytes_and_names_no_folder(weights, half, capsys):
    with safe_open(half, "pt") as handle:
        kinds = {handle.get_tensor(key).dtype for key in handle.keys()}  # noqa: SIM118
        assert torch.float16 in kinds and torch.float32 not in kinds
        assert str(weights.parent) not in json.dumps(handle.metadata())
    whole, small_one = (trained_model.load_model(path, device="cpu") for path in (weights, half))
    assert half.stat().st_size < 0.7 * weights.stat().st_size
    assert (small_one.step, small_one.info) == (whole.step, whole.info)
    assert small_one.config.hash == whole.config.hash
    again = Backbone.from_pretrained(half).state_dict()
    for name, value in whole.model.state_dict().items():
        rounded = value.half().to(value.dtype) if value.is_floating_point() else value
        assert torch.equal(small_one.model.state_dict()[name], rounded), name
        assert torch.equal(again[name], rounded) and again[name].dtype == value.dtype, name


def test_it_draws_what_the_whole_weights_draw(weights, half, tmp_path):
    pictures = []
    for path in (weights, half):
        out = tmp_path / path.stem
        words = [str(path), "--classes", "3,7", "--seeds", "0-3", "--device", "cpu", "--out", str(out)]
        assert run_command(sample.main, words) == 0
        with np.load(out / "samples.npz") as data:
            pictures.append(data["arr_0"].astype(int))
    assert np.abs(pictures[0] - pictures[1]).mean() < 2 < pictures[0].std()


def test_the_analysis_opens_it(half, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # results of an exported file go to the current folder
    few = ["--samples", "8", "--batch", "8", "--levels", "1"]
    assert command.main(["similarity", str(half), *few]) == 0
    assert command.main(["guidance-scale", str(half), *few]) == 0
    assert (tmp_path / "mamba_1-2.similarity.npz").is_file()
    assert (tmp_path / "mamba_1-2.guidance_scale.json").is_file()


def test_help_needs_no_torch():
    words = [sys.executable, "-X", "importtime", str(ROOT / "experiments" / "export.py"), "--help"]
    shown = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "--half" in shown.stdout and " torch" not in shown.stderr


def test_what_cannot_be_exported_is_one_sentence(weights, tmp_path, capsys):
    assert exported(weights, tmp_path / "model.pt") == 2
    assert "expected a name that ends in .safetensors" in capsys.readouterr().err
    assert exported(tmp_path / "no", tmp_path / "model.safetensors") == 2
    assert "does not exist" in capsys.readouterr().err
    loaded = trained_model.load_model(weights, device="cpu")
    state = loaded.model.state_dict()
    name = next(key for key, value in state.items() if value.is_floating_point())
    state[name] = torch.full_like(state[name], 1e5)
    large = tmp_path / "large.safetensors"
    trained_model.export(large, loaded.model, state, loaded.config, 7, loaded.info)
    out = tmp_path / "half.safetensors"
    assert exported(large, out, "--half") == 2 and not out.exists()
    assert f"{name} does not fit float16" in capsys.readouterr().err
    assert exported(large, out) == 0
