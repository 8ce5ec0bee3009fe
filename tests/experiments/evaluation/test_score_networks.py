"""The score networks that come with the package: their size, their hashes, their accuracy and how they are trained."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from experiments.data import create
from experiments.evaluation import create_features, small_networks, train_score_networks
from experiments.evaluation.images import whole_split
from experiments.evaluation.small_networks import (
    SHIPPED,
    SHIPPED_FOLDER,
    load_shipped,
    own_network_plan,
)
from experiments.options.evaluation import MetricError
from experiments.runtime.command import run_command

FASHION = Path("/usr/share/datasets/fashion-mnist")  # of Debian's package dataset-fashion-mnist
installed = pytest.mark.skipif(not FASHION.is_dir(), reason="needs apt install dataset-fashion-mnist")
DATA = [{"name": "digits"}, {"name": "mnist"}, pytest.param({"name": "fashion", "path": str(FASHION)}, marks=installed)]
KINDS = ["classifier", "autoencoder"]


def stored_quality(name):
    with safe_open(SHIPPED_FOLDER / f"{name}.safetensors", framework="pt") as handle:
        return float(handle.metadata()["accuracy"])


def test_the_networks_take_no_more_than_two_and_a_half_megabytes():
    files = sorted(SHIPPED_FOLDER.iterdir())
    assert [path.stem for path in files] == sorted(SHIPPED)
    assert sum(path.stat().st_size for path in files) <= 2.5e6


@pytest.mark.parametrize("data", DATA, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_network_of_the_package_is_used_as_it_is(data, kind, tmp_path):
    dataset, name = create(data), "autoencoder"
    if kind == "classifier":
        name = f"{data['name']}-classifier"
    features = create_features(name, cache=tmp_path, dataset=dataset)
    assert features.checksum == SHIPPED[f"{data['name']}-{kind}"]
    assert "comes with the package" in features.note
    assert not list(tmp_path.iterdir())  # nothing was trained
    if kind == "classifier":
        pixels, labels = whole_split(dataset, "test")
        some = torch.arange(0, len(pixels), -(-len(pixels) // 1000))
        right = features(pixels[some])["logits"].argmax(1) == labels[some]
        # Up to 1,000 images: three standard errors at 90 % are 3 %.
        assert right.double().mean().item() == pytest.approx(stored_quality(name), abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_training_a_network_anew_gives_the_quality_of_the_one_in_the_package(kind, tmp_path):
    data = {"name": "digits"}
    network = train_score_networks.train(data, kind, tmp_path)
    # The very same bits on the machines tried so far; other versions of torch may sum in another order.
    assert network.quality == pytest.approx(stored_quality(f"{data['name']}-{kind}"), abs=0.005)
    assert network.path.name == f"{data['name']}-{kind}.safetensors"


def test_the_command_trains_both_networks(tmp_path, monkeypatch, capsys):
    quick, quick_code = small_networks.Recipe(epochs=1), small_networks.CodeRecipe(steps=2)
    monkeypatch.setattr("experiments.evaluation.small_networks.Recipe", lambda epochs: quick)
    monkeypatch.setattr("experiments.evaluation.small_networks.CodeRecipe", lambda: quick_code)
    assert run_command(train_score_networks.main, ["digits", "--out", str(tmp_path)]) == 0
    networks = sorted(path.stem for path in tmp_path.iterdir())
    assert networks == ["digits-autoencoder", "digits-classifier"]
    assert "digits-classifier: differs from the weights" in capsys.readouterr().out


@pytest.fixture
def copies(tmp_path, monkeypatch):
    folder = Path(shutil.copytree(SHIPPED_FOLDER, tmp_path / "copies"))
    monkeypatch.setattr(small_networks, "SHIPPED_FOLDER", folder)
    return folder


def shipped_digits(**options):
    return load_shipped(own_network_plan("classifier", create({"name": "digits", **options})))


def test_other_images_train_a_network_of_their_own(copies):
    assert shipped_digits() is not None
    assert shipped_digits(split_seed=1) is None


@pytest.mark.parametrize("damage", ["missing", "other weights"])
def test_a_damaged_network_is_refused(copies, damage):
    path = copies / "digits-classifier.safetensors"
    if damage == "missing":
        path.unlink()
    else:
        with safe_open(path, framework="pt") as handle:
            metadata = handle.metadata()
        weights = load_file(path)
        weights["head.bias"] += 1e-3
        save_file(weights, path, metadata=metadata)
    with pytest.raises(MetricError, match=r"digits-classifier\.safetensors is missing or damaged"):
        shipped_digits()
