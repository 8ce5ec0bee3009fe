"""The score networks that come with the package: their size, their hashes, their accuracy and how they are trained."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small import ROOT

from experiments.data import create
from experiments.evaluation import create_features, small_networks
from experiments.evaluation.images import whole_split
from experiments.evaluation.small_networks import (
    SHIPPED,
    SHIPPED_FOLDER,
    load_shipped,
    own_network_plan,
)
from experiments.options.evaluation import MetricError

FASHION = Path("/usr/share/datasets/fashion-mnist")  # of Debian's package dataset-fashion-mnist
installed = pytest.mark.skipif(not FASHION.is_dir(), reason="needs apt install dataset-fashion-mnist")
DATA = [{"name": "digits"}, {"name": "mnist"}, pytest.param({"name": "fashion", "path": str(FASHION)}, marks=installed)]
KINDS = ["classifier", "autoencoder"]


def stored_quality(name, folder=SHIPPED_FOLDER):
    with safe_open(folder / f"{name}.safetensors", framework="pt") as handle:
        return float(handle.metadata()["accuracy"])


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
def test_the_tool_trains_networks_of_the_quality_of_those_in_the_package(tmp_path):
    tool = ROOT / "tests" / "tools" / "train_score_networks.py"
    subprocess.run([sys.executable, str(tool), "digits", "--out", str(tmp_path)], check=True)
    for kind in KINDS:
        name = f"digits-{kind}"
        # The very same bits on the machines tried so far; other versions of torch may sum in another order.
        assert stored_quality(name, tmp_path) == pytest.approx(stored_quality(name), abs=0.005)


def test_other_images_train_a_network_of_their_own_and_other_weights_are_refused(tmp_path, monkeypatch):
    def shipped(**options):
        return load_shipped(own_network_plan("classifier", create({"name": "digits", **options})))

    assert shipped() is not None
    assert shipped(split_seed=1) is None
    path = SHIPPED_FOLDER / "digits-classifier.safetensors"
    with safe_open(path, framework="pt") as handle:
        metadata = handle.metadata()
    weights = load_file(path)
    weights["head.bias"] += 1e-3
    save_file(weights, tmp_path / path.name, metadata=metadata)
    monkeypatch.setattr(small_networks, "SHIPPED_FOLDER", tmp_path)
    with pytest.raises(MetricError, match=r"digits-classifier\.safetensors is missing or damaged"):
        shipped()
