"""experiments/export.py: one file of half the bytes that every command opens by its path."""

import json

import pytest
import torch
from evaluation_tools import export_weights
from safetensors import safe_open
from small import small

from backbones import Backbone
from experiments import export
from experiments.evaluation import trained_model
from experiments.runtime.command import run_command


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Weights of a run whose folders are somewhere on this machine."""
    folder = tmp_path_factory.mktemp("export")
    config = small(folder / "runs", "backbone=mamba", "route=1-2", f"paths.cache={folder}")
    return export_weights(folder / "model.safetensors", config)


def exported(source, out, *more):
    return run_command(export.main, [str(source), str(out), *more])


def test_it_is_half_the_bytes_and_names_no_folder(weights):
    half = weights.parent / "box" / "mamba_1-2.safetensors"
    assert exported(weights, half, "--half") == 0
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
