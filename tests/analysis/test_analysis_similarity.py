"""Layer similarity: the arithmetic against plain formulas, and the pass over a real (tiny) model."""

import shutil

import numpy as np
import pytest
import torch
from analysis_runs import similarity_map, write
from PIL import Image

import analysis
import backbones
from analysis.command import main
from analysis.measurements.similarity import Protocol, cosine, measure, pairs, read
from experiments.config.compose import load
from experiments.evaluation.trained_model import export


def layers(count=4, batch=2, tokens=5, width=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, tokens, width, generator=generator) for _ in range(count)]


def test_cosine_is_per_token_over_channels():
    hidden = layers()
    mean = cosine(hidden) / 10
    for i in range(4):
        for j in range(4):
            expected = torch.nn.functional.cosine_similarity(hidden[i].double(), hidden[j].double(), dim=-1).mean()
            assert mean[i, j].item() == pytest.approx(expected.item(), abs=1e-12)
    assert torch.allclose(mean.diagonal(), torch.ones(4, dtype=torch.float64))
    # Scale does not count, sign does.
    assert torch.allclose(cosine([hidden[0], -3 * hidden[0]])[0, 1], torch.tensor(-10.0, dtype=torch.float64))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A tiny model, routed up to the last tenth, with gates that are not zero, exported as a run exports it."""
    torch.manual_seed(0)
    config = load(["backbone=dit", "data=digits", "route=2-4/0.9:none", "backbone.depth=8"])
    model = backbones.create("dit", "T/1", depth=8, in_channels=1, input_size=8, num_classes=10)
    for parameter in model.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("run")
    info = {"name": "digits", "shape": [1, 8, 8], "num_classes": 10}
    export(folder / "model.safetensors", model, model.state_dict(), config, 7, info)
    return folder


def test_a_run_is_measured_and_its_protocol_stored(exported, tmp_path):
    protocol = Protocol(levels=(0.5, 2.0), samples=6, batch=4)
    result = measure(exported, protocol, device="cpu")
    assert result.cosine.shape == (9, 9) and np.allclose(result.cosine, result.cosine.T)
    assert np.allclose(np.diag(result.cosine), 1) and 0.99 > result.cosine.min() > -1
    by_level = [measure(exported, Protocol((level,), samples=6, batch=2), device="cpu") for level in (0.5, 2.0)]
    # Levels count alike, and batches change nothing.
    assert np.allclose(result.cosine, (by_level[0].cosine + by_level[1].cosine) / 2, atol=1e-5)
    assert (result.protocol["levels"], result.protocol["samples"], result.protocol["step"]) == ([0.5, 2.0], 6, 7)
    result.save(tmp_path / "s.npz")
    assert read(tmp_path / "s.npz").route == "2-4"


def test_no_more_samples_than_are_held_out(exported, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = sorted(exported.iterdir())
    model = exported / "model.safetensors"
    words = ["--samples", "400", "--batch", "180", "--levels", "1"]
    assert main(["similarity", str(model), *words]) == 0
    # An exported file may be a bundled one: its folder is left as it is.
    assert sorted(exported.iterdir()) == before
    assert {path.name for path in tmp_path.iterdir()} == {"model.similarity.npz", "model.similarity.png"}
    with Image.open("model.similarity.png") as image:
        assert image.format == "PNG" and np.asarray(image.convert("L")).std() > 10
    assert read(tmp_path / "model.similarity.npz").protocol["samples"] == 360
    # A second file of that name would overwrite the result of the first.
    (tmp_path / "other").mkdir()
    shutil.copy(model, "other")
    assert main(["similarity", str(model), "other/model.safetensors"]) == 2
    assert "2 of the files are called model.safetensors" in capsys.readouterr().err


def test_pairs_are_the_longest_dense_and_routed_run_of_each_backbone(tmp_path):
    def stored(backbone, route, seed, **options):
        folder = write(tmp_path, backbone, route, seed, **options)
        similarity_map(np.eye(13), route, backbone, run=folder.name).save(folder / "similarity.npz")
        return folder.name

    stored("dit", "none", 0, train__steps=200)
    expected = [stored("dit", "2-8", 0), stored("dit", "none", 0, train__steps=800), stored("rwkv", "2-8", 0)]
    stored("dit", "2-8", 1)  # another seed
    stored("dit", "0-8", 0)  # a less frequent route
    stored("dit", "2-8@0.75", 0)  # another rate
    write(tmp_path, "mamba", "none", 0)  # neither a stored map nor weights
    runs = analysis.load(tmp_path)
    assert [item.protocol["run"] for item in pairs(runs)] == expected
