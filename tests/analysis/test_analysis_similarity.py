"""Layer similarity: the arithmetic against plain formulas, and the pass over a real (tiny) model."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image

import backbones
from analysis.command import main
from analysis.errors import AnalysisError
from analysis.similarity import Protocol, centre, cosine, hsic, measure, read
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
            expected = torch.nn.functional.cosine_similarity(
                hidden[i].double(), hidden[j].double(), dim=-1
            ).mean()
            assert mean[i, j].item() == pytest.approx(expected.item(), abs=1e-12)
    assert torch.allclose(mean.diagonal(), torch.ones(4, dtype=torch.float64))
    # Scale does not count, sign does.
    assert torch.allclose(
        cosine([hidden[0], -3 * hidden[0]])[0, 1], torch.tensor(-10.0, dtype=torch.float64)
    )


def test_sums_over_batches_are_the_sum_over_all():
    hidden = layers(batch=6)
    parts = sum(cosine([h[i : i + 2] for h in hidden]) for i in (0, 2, 4))
    assert torch.allclose(parts, cosine(hidden))


def test_centred_features_have_no_mean():
    for h in centre(layers()):
        assert torch.allclose(h.mean(dim=(0, 1)), torch.zeros(8), atol=1e-6)


def test_hsic_is_the_unbiased_estimator():
    hidden = [h.reshape(-1, 8) for h in layers()]
    value = hsic(hidden)
    k, other = (h.double() @ h.double().T for h in hidden[:2])
    k, other = k - torch.diag(k.diagonal()), other - torch.diag(other.diagonal())
    m, one = 10, torch.ones(10, dtype=torch.float64)
    expected = (
        torch.trace(k @ other)
        + (one @ k @ one) * (one @ other @ one) / ((m - 1) * (m - 2))
        - 2 / (m - 2) * (one @ k @ other @ one)
    ) / (m * (m - 3))
    assert value[0, 1].item() == pytest.approx(expected.item())
    # Unrelated features: around zero, where the biased estimator is far above.
    wide = [torch.randn(400, 50, generator=torch.Generator().manual_seed(s)) for s in (1, 2)]
    related = hsic(wide)
    assert abs(related[0, 1] / (related[0, 0] * related[1, 1]).sqrt()) < 0.05


@pytest.mark.parametrize(
    ("key", "value"), [("samples", 0), ("batch", 0), ("levels", ()), ("levels", (0.0, 1.0))]
)
def test_a_protocol_without_samples_or_levels_is_refused(key, value):
    with pytest.raises(AnalysisError, match=f"similarity --{key} .*: expected"):
        Protocol(**{key: value})


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
    protocol = Protocol(
        levels=(0.5, 2.0), samples=6, batch=4, per_level=True, centred=True, routed=True
    )
    result = measure(exported, protocol, device="cpu")
    cos = result.arrays["cosine"]
    assert cos.shape == (9, 9) and np.allclose(cos, cos.T) and np.allclose(np.diag(cos), 1)
    assert (np.abs(cos) <= 1 + 1e-9).all() and cos.min() < 0.99
    assert np.allclose(result.arrays["per_level"].mean(axis=0), cos)
    assert np.allclose(np.diag(result.arrays["cka"]), 1)
    assert (result.protocol["levels"], result.protocol["samples"], result.protocol["step"]) == (
        [0.5, 2.0],
        6,
        7,
    )
    result.save(tmp_path / "s.npz")
    assert read(tmp_path / "s.npz").route == "2-4"


def test_batches_do_not_change_the_result(exported):
    one = measure(exported, Protocol(levels=(1.0,), samples=6, batch=6), device="cpu").arrays[
        "cosine"
    ]
    two = measure(exported, Protocol(levels=(1.0,), samples=6, batch=2), device="cpu").arrays[
        "cosine"
    ]
    assert np.allclose(one, two, atol=1e-5)


def test_tokens_that_took_the_route_do_not_move_inside_it(exported):
    result = measure(
        exported, Protocol(levels=(1.0,), samples=4, batch=4, routed=True), device="cpu"
    )
    routed, stayed = result.arrays["routed"], result.arrays["stayed"]
    # Route 2-4: the outputs of blocks 1 to 4 (at 2 to 5) are one state for tokens that skip.
    assert np.allclose(routed[2:6, 2:6], 1, atol=1e-9)
    assert stayed[2:6, 2:6].min() < 0.999
    assert routed[1, 2] < 0.9999 and routed[5, 6] < 0.9999


def test_no_more_samples_than_are_held_out(exported, tmp_path, monkeypatch):
    found = measure(exported, Protocol(levels=(1.0,), samples=10**6, batch=180), device="cpu")
    assert found.protocol["samples"] == 360
    words = ["--samples", "400", "--batch", "180", "--levels", "1"]
    monkeypatch.chdir(tmp_path)
    before = sorted(exported.iterdir())
    assert main(["similarity", str(exported / "model.safetensors"), *words]) == 0
    # An exported file may be a bundled one: its folder is left as it is.
    assert sorted(exported.iterdir()) == before
    assert {path.name for path in tmp_path.iterdir()} == {
        "model.similarity.npz",
        "model.similarity.png",
    }
    with Image.open("model.similarity.png") as image:
        assert image.format == "PNG" and np.asarray(image.convert("L")).std() > 10
    stored = read(tmp_path / "model.similarity.npz")
    assert (
        stored.protocol["samples"] == 360
        and (stored.arrays["cosine"] == found.arrays["cosine"]).all()
    )


def test_two_exported_files_of_one_name_overwrite_nothing(exported, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    shutil.copy(exported / "model.safetensors", "other")
    files = [str(exported / "model.safetensors"), "other/model.safetensors"]
    assert main(["similarity", *files]) == 2
    assert "2 of the files are called model.safetensors" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_the_command_knows_routed_runs_by_their_configuration(exported, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [tmp_path / name for name in ("of_none_routed.safetensors", "dense.safetensors")]
    shutil.copy(exported / "model.safetensors", runs[0])
    model = backbones.create("dit", "T/1", depth=2, in_channels=1, input_size=8, num_classes=10)
    config = load(["backbone=dit", "data=digits", "route=none", "backbone.depth=2"])
    info = {"name": "digits", "shape": [1, 8, 8], "num_classes": 10}
    export(runs[1], model, model.state_dict(), config, 1, info)
    words = ["--routed", "--samples", "2", "--batch", "2", "--levels", "1"]
    assert main(["similarity", *map(str, runs), *words]) == 0
    found = [read(tmp_path / f"{run.stem}.similarity.npz").arrays.keys() for run in runs]
    assert found == [{"cosine", "routed", "stayed"}, {"cosine"}]
