"""Which folders of images are classes, and what systems leave beside them."""

import json

import numpy as np
import pytest
import torch
from data_tools import latents, write_tars
from PIL import Image

from experiments.data import DataError, create
from experiments.data.latent_store import open_store
from experiments.data.open_source import open_source

APPLE_DOUBLE = b"\0\5\26\7\0\2\0\0Mac OS X        " + b"\0" * 4000


def image(path, size=16):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((size, size, 3), 90, np.uint8)).save(path)


def labels_of(source):
    return {raw.name: raw.label for raw in source.read(0, source.count)}


def test_what_systems_and_editors_leave_is_no_class_and_no_image(tmp_path):
    for name in ("cat", "dog", "cat/.ipynb_checkpoints", ".ipynb_checkpoints", ".trash", "@eaDir/cat"):
        image(tmp_path / name / "0.jpg")
    for name in ("__MACOSX/cat/._0.jpg", "cat/._1.jpg", ".DS_Store", "Thumbs.db"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(APPLE_DOUBLE)
    source = open_source(tmp_path)
    assert source.classes == ("cat", "dog")
    assert labels_of(source) == {"cat/0.jpg": 0, "dog/0.jpg": 1}
    assert source.ignored_files == ["Thumbs.db"]


def test_a_folder_without_a_readable_image_is_no_class(tmp_path):
    for name in ("ant/0.png", "cat/1.png"):
        image(tmp_path / name)
    for name in ("bee/0.png", "bee/1.jpg", "cat/0.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"no image")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/readme.txt").write_text("x")
    source = open_source(tmp_path)
    assert source.classes == ("ant", "cat") and source.labelled
    raws = list(source.read(0, source.count))
    assert {raw.name: raw.label for raw in raws} == {
        "ant/0.png": 0, "bee/0.png": None, "bee/1.jpg": None, "cat/0.png": 1, "cat/1.png": 1,
    }  # fmt: skip
    bee = [raw for raw in raws if raw.name.startswith("bee")]
    assert [(raw.content, raw.unreadable_reason) for raw in bee] == [
        (None, "not an image format that Pillow reads")
    ] * 2


def test_numbered_folders_are_classes_by_number(tmp_path):
    for number in range(12):
        image(tmp_path / str(number) / "0.png")
    source = open_source(tmp_path)
    assert source.classes == tuple(map(str, range(12)))
    assert labels_of(source)["10/0.png"] == 10 and labels_of(source)["2/0.png"] == 2


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["train/cat/0.png", "val/cat/0.png"], ["holds the splits train, val", "/train"]),
        (["Data/CLS-LOC/train/n01/0.png", "Data/CLS-LOC/val/0.png"], ["CLS-LOC holds the splits"]),
        (["00000/img00000000.png", "00000/img00000001.png"], ["EDM's layout", "dataset.json"]),
    ],
)
def test_folders_that_are_no_classes_are_refused(tmp_path, names, words):
    for name in names:
        image(tmp_path / name)
    with pytest.raises(DataError) as error:
        open_source(tmp_path)
    assert all(word in str(error.value) for word in words), error.value


def edm_folder(tmp_path, labels):
    names = [f"{k // 2:05d}/img{k:08d}.png" for k in range(4)]
    for name in names:
        image(tmp_path / name)
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": labels and labels(names)}))
    return names


def test_edms_layout_takes_its_labels_from_dataset_json(tmp_path):
    names = edm_folder(tmp_path, lambda names: [[name, k % 3] for k, name in enumerate(names)])
    source = open_source(tmp_path)
    assert source.labelled and source.classes == () and source.ignored_files == []
    assert labels_of(source) == dict(zip(names, [0, 1, 2, 0], strict=True))


def test_edms_layout_without_labels_has_no_classes(tmp_path):
    edm_folder(tmp_path, None)
    source = open_source(tmp_path)
    assert not source.labelled and set(labels_of(source).values()) == {None}


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (lambda names: [[name, 0] for name in names[1:]], "no label for 00000/img00000000.png"),
        (lambda names: [[name, -1] for name in names], "expected pairs"),
    ],
)
def test_damaged_labels_of_edm_are_named(tmp_path, labels, words):
    edm_folder(tmp_path, labels)
    with pytest.raises(DataError, match=words):
        open_source(tmp_path)


def test_fractional_labels_are_refused(tmp_path):
    from safetensors.torch import save_file

    numbers = torch.tensor([0.0, 1.0, 0.5])
    save_file({"latents": torch.randn(3, 4, 8, 8), "labels": numbers}, tmp_path / "a.safetensors")
    with pytest.raises(DataError, match=r"a\.safetensors has labels of type torch.float32; expected integers"):
        open_store(tmp_path)


def test_labels_that_count_from_one_are_warned_about(tmp_path):
    write_tars(tmp_path, latents(4), [1, 2, 3, 1])
    with pytest.warns(UserWarning, match="smallest label is 1, so class 0 has no sample"):
        data = create({"name": "latents", "path": str(tmp_path)}, task="class")
    assert data.num_classes == 4
