"""Which folders of images are classes, and what systems leave beside them."""

import json

import pytest
from data_tools import picture

from experiments.data import DataError
from experiments.data.open_source import open_source

APPLE_DOUBLE = b"\0\5\26\7\0\2\0\0Mac OS X        " + b"\0" * 4000


def labels_of(source):
    return {raw.name: raw.label for raw in source.read(0, source.count)}


def test_what_systems_and_editors_leave_is_no_class_and_no_picture(tmp_path):
    for name in ("cat", "dog", "cat/.ipynb_checkpoints", ".ipynb_checkpoints", ".trash", "@eaDir/cat"):
        picture(tmp_path / name / "0.jpg")
    for name in ("__MACOSX/cat/._0.jpg", "cat/._1.jpg", ".DS_Store", "Thumbs.db"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(APPLE_DOUBLE)
    source = open_source(tmp_path)
    assert source.classes == ("cat", "dog")
    assert labels_of(source) == {"cat/0.jpg": 0, "dog/0.jpg": 1}
    assert str(source.left_out) == ".db files: 1 (Thumbs.db)"


def test_numbered_folders_are_classes_by_number(tmp_path):
    for number in range(12):
        picture(tmp_path / str(number) / "0.png")
    source = open_source(tmp_path)
    assert source.classes == tuple(map(str, range(12)))
    assert labels_of(source)["10/0.png"] == 10 and labels_of(source)["2/0.png"] == 2


def test_folders_that_are_no_classes_are_refused(tmp_path):
    layouts = {
        "splits": (["train/cat/0.png", "val/cat/0.png"], "holds the splits train, val.*/train"),
        "imagenet": (["CLS-LOC/train/n01/0.png", "CLS-LOC/val/0.png"], "CLS-LOC holds the splits"),
        "edm": (["00000/img00000000.png", "00000/img00000001.png"], "EDM's layout.*dataset.json"),
    }
    for folder, (names, words) in layouts.items():
        for name in names:
            picture(tmp_path / folder / name)
        with pytest.raises(DataError, match=words):
            open_source(tmp_path / folder)


def test_edms_layout_takes_its_labels_from_dataset_json(tmp_path):
    names = [f"{k // 2:05d}/img{k:08d}.png" for k in range(4)]
    for name in names:
        picture(tmp_path / name)

    def opened(labels):
        (tmp_path / "dataset.json").write_text(json.dumps({"labels": labels}))
        return open_source(tmp_path)

    source = opened([[name, k % 3] for k, name in enumerate(names)])
    assert source.labelled and source.classes == () and str(source.left_out) == ""
    assert labels_of(source) == dict(zip(names, [0, 1, 2, 0], strict=True))
    source = opened(None)
    assert not source.labelled and set(labels_of(source).values()) == {None}
    with pytest.raises(DataError, match="no label for 00000/img00000000.png"):
        opened([[name, 0] for name in names[1:]])
    with pytest.raises(DataError, match="expected pairs"):
        opened([[name, -1] for name in names])
