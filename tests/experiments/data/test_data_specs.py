from dataclasses import dataclass

import numpy as np
import pytest
import torch
from data_tools import latents, write_imported, write_lightning, write_store

from experiments.config import load, names
from experiments.data import create, registry
from experiments.data.data_options import DataError, ShapeError
from experiments.data.dataset import PixelSet
from experiments.data.image_options import ImageOptions, SplitOptions
from experiments.data.image_sets import LabelledImages, split_by_class
from experiments.data.registry import parse

LABELS = [k % 4 for k in range(8)]


def test_embedded_data_are_as_described():
    for name, task in (("digits", "class"), ("mnist", "class"), ("scenes", "class"), ("scenes", "text")):
        description, data = parse({"name": name}).describe(), create({"name": name}, task=task)
        assert tuple(description["shape"]) == data.shape
        if task == "class":
            assert description["num_classes"] == data.num_classes
        else:
            assert tuple(description["text"]) == data.text
        assert parse({"name": name}).fingerprint() == "embedded"


def test_a_data_set_names_what_scores_it():
    for name in registry.DATA_SETS:
        assert registry.evaluation_preset(name) == name and name in names("eval")
    assert load(["data=fashion"]).eval == load(["data=fashion", "eval=fashion"]).eval
    assert registry.evaluation_preset("blobs") == "none"


def test_latents_are_described_by_their_headers(tmp_path):
    stores = (
        write_store(tmp_path / "store", latents(8, side=6), LABELS),
        write_imported(tmp_path / "tars", latents(8, channels=16, side=6), LABELS),
        write_imported(tmp_path / "moments", latents(8, channels=8, side=6), LABELS),
        write_lightning(tmp_path / "lightning", latents(8, 32), latents(8, 32), LABELS),
    )
    for path in stores:
        options = {"name": "latents", "path": str(path), "scale": "std", "num_classes": 4}
        before = parse(options).fingerprint()
        description, data = parse(options).describe(), create(options)
        assert tuple(description["shape"]) == data.shape and description["num_classes"] == data.num_classes
        assert parse(options).fingerprint() == before != "absent"


def test_latents_of_another_shape_than_asked_are_refused(tmp_path):
    words = ["scale=paper", "size=T/1", "backbone=lightningdit"]
    vavae = write_lightning(tmp_path / "v", latents(8, 32, side=16), latents(8, 32, side=16), LABELS)
    stable = write_store(tmp_path / "s", latents(8, side=32), LABELS)
    for path in (vavae, tmp_path / "nowhere"):
        config = load([*words, f"data.path={path}", "data.shape=[32,16,16]"])
        assert config.data.describe()["shape"] == [32, 16, 16]
    with pytest.raises(ShapeError, match=r"are 4x32x32; expected latents of 32x16x16 in data\.path"):
        load([*words, f"data.path={stable}", "data.shape=[32,16,16]"])
    # The backbone itself takes any latents, and a key that is not set names no run anew.
    words += [f"data.path={stable}", "guidance=cfg"]
    old = load(words)
    del old.composed["data"]["shape"], old.composed["guidance"]["channels"]
    assert old.name == load(words).name != load([*words, "guidance.channels=3"]).name


def test_what_is_not_there_is_described(tmp_path):
    assert parse({"name": "latents"}).describe()["shape"] == [4, 32, 32]
    options = {"name": "latents", "path": str(tmp_path / "nowhere")}
    assert parse(options).describe()["num_classes"] == 1000 and parse(options).fingerprint() == "absent"


def test_a_data_set_of_ones_own_is_one_class(monkeypatch):
    """What CONTRIBUTING says, done: a class and its entry in DATA_SETS, which is described and read."""

    @dataclass(frozen=True)
    class BlobsOptions(SplitOptions):
        name: str = "blobs"
        sample_shape, class_count = (1, 8, 8), 2

        def read(self):
            images = np.arange(20 * 64).reshape(20, 8, 8) % 251
            return split_by_class(self, images, np.arange(20) % 2, white=255)

    monkeypatch.setitem(registry.DATA_SETS, "blobs", BlobsOptions)
    assert parse({"name": "blobs"}).describe()["shape"] == [1, 8, 8]
    data = create({"name": "blobs"}, task="class")
    assert data.sizes == {"train": 16, "test": 4}
    assert sorted(data.batch(torch.arange(4), split="test").y.tolist()) == [0, 0, 1, 1]


def test_what_a_data_set_of_ones_own_reads():
    """Labels are an array, a list or a tensor; what cannot be trained on is one sentence."""
    images, labels = np.arange(4 * 64, dtype=np.uint8).reshape(4, 1, 8, 8), [0, 1, 0, 1]

    def opened(split, read_images, read_labels):
        class Own(ImageOptions):
            sample_shape, class_count = (1, 8, 8), 2

            def read(self):
                return LabelledImages({split: (read_images, read_labels)}, ["round", "square"])

        return PixelSet(Own("own"))

    for read_labels in (labels, np.array(labels), torch.tensor(labels)):
        assert opened("train", images, read_labels).batch(torch.arange(4)).y.tolist() == labels
    with pytest.raises(DataError, match="no training images, or all their pixels are equal"):
        opened("test", images, labels)
    with pytest.raises(DataError, match=r"labels \(4,\), \[0\] to \[2\].*labels below 2"):
        opened("train", images, [0, 1, 2, 1])
