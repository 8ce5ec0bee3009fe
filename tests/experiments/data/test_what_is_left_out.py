"""Samples and labels do not vanish: names that share a key, files of several splits, small classes, damaged values."""

import io
import json
import os
import tarfile

import numpy as np
import pytest
import torch
from data_tools import add, latents, picture, refused, write_store
from PIL import Image
from safetensors.torch import save_file
from small import small

from experiments import evaluate
from experiments.data import create
from experiments.data.latent_store import open_store
from experiments.data.open_source import open_source
from experiments.data.registry import parse
from experiments.evaluation.images import Images
from experiments.runtime.command import run_command
from experiments.training.session import train


def image_bytes():
    stream = io.BytesIO()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def tar_of(path, names):
    """A tar of files by name: labels and captions hold the number of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for number, name in enumerate(names):
            add(archive, name, image_bytes() if name.lower().endswith((".png", ".jpg")) else str(number).encode())
    return path


# Names of the members of a tar; names and labels of its samples; what it says of the others.
TARS = {
    "usual": (["a.png", "a.cls", "b.cls", "b.png"], {"a": 1, "b": 2}, ""),
    "dots": (["p 0.0.png", "p 0.1.png", "p 1.0.png"], {"p 0.0": None, "p 0.1": None, "p 1.0": None}, ""),
    "dots with labels": (["I_0.0.png", "I_0.0.cls", "I_0.1.cls", "I_0.1.png"], {"I_0.0": 1, "I_0.1": 2}, ""),
    "times": (["2024-01-01 10.15.03.PNG", "2024-01-01 10.15.03.cls"], {"2024-01-01 10.15.03": 1}, ""),
    "a lone dot": (["v1.0.png", "v1.0.cls"], {"v1.0": 1}, ""),
    "dots and none": (["p.png", "p.1.png"], {"p": None}, "further images of a sample: 1 (0.tar: p.1.png)"),
    "depth": (["a.depth.png", "a.png", "a.cls"], {"a": 2}, "further images of a sample: 1 (0.tar: a.depth.png)"),
    "depth alone": (["a.depth.png", "a.cls"], {"a": 1}, ""),
    "equal keys": (["a.png", "a.jpg"], {"a": None}, "further images of a sample: 1 (0.tar: a.jpg)"),
    "equal names": (["a.png", "b.png", "a.png"], {"a": None, "b": None}, "earlier files of the same name: 1 (0.tar: a.png)"),
    "a label alone": (["a.png", "b.cls"], {"a": None}, ".cls files without an image: 1 (0.tar: b.cls)"),
    "json": (["a.png", "a.json", "b.png", "b.json"], {"a": None, "b": None}, ".json files: 2 (0.tar: a.json, ...)"),
    "folders": (["cat/a.png", "dog/a.png"], {"cat/a": None, "dog/a": None}, "labels of a tar are KEY.cls: 2 (cat, ...)"),
}


@pytest.mark.parametrize(("names", "labels", "left_out"), TARS.values(), ids=TARS)
def test_images_and_labels_of_a_tar_are_all_read_or_counted(tmp_path, names, labels, left_out):
    source = open_source(tar_of(tmp_path / "0.tar", names))
    assert {raw.name.removeprefix("0.tar: "): raw.label for raw in source.read(0, source.count)} == labels
    assert str(source.left_out).endswith(left_out) and bool(left_out) == bool(str(source.left_out))


@pytest.mark.parametrize(
    ("names", "refusal"),
    [
        (["data/train-00000-of-00001", "data/validation-00000-of-00001", "data/test-00000-of-00001"], "--files 'train-*-of-*"),
        (["imagenet1k-train-0000", "imagenet1k-validation-0000"], "--files 'imagenet1k-train-*"),
        (["train/0", "val/0"], "several splits"),
        (["Train2014_0", "dev_0"], "several splits"),
        (["train-0", "train-1"], None),
        (["train-0", "extra-0"], None),
        (["valley-0", "trainer-0", "contest-0"], None),
        (["test-of-train-0", "train-0"], None),
    ],
)
def test_files_of_several_splits_are_not_one_data_set(tmp_path, names, refusal):
    for name in names:
        tar_of(tmp_path / f"{name}.tar", ["a.png"])
    if refusal is None:
        assert open_source(tmp_path).count == len(names)
    else:
        refused(lambda: open_source(tmp_path), refusal)
    shards = tmp_path / "shards"
    shards.mkdir()
    for name in names:
        save_file({"latents": torch.zeros(2, 4, 8, 8)}, shards / f"{name.replace('/', '-')}.safetensors")
    if refusal is not None:
        refused(lambda: open_store(shards), "several splits")


def test_captions_are_of_one_image_each(tmp_path):
    for name in ("cat/0.png", "dog/0.png"):
        picture(tmp_path / "images" / name)
    captions = tmp_path / "captions.jsonl"

    def opened(*names):
        captions.write_text("".join(json.dumps({"file_name": name, "caption": name}) + "\n" for name in names))
        return open_source(tmp_path / "images", captions=captions)

    refused(lambda: opened("0.png"), "captions of 0.png", "cat/0.png and dog/0.png")
    source = opened("cat/0.png", "dog/0.png", "dog/1.png")
    assert [raw.captions for raw in source.read(0, 2)] == [("cat/0.png",), ("dog/0.png",)]
    assert str(source.left_out) == "captions of other files: 1 (dog/1.png)"


def test_every_class_of_a_folder_has_a_training_picture_and_what_is_not_read_is_named(tmp_path):
    for name in ("a", "b", "c", "d", "e", "f"):
        picture(tmp_path / "single" / name / "0.png", (40 * ord(name) % 256, 0, 0))
    for number in range(4):
        picture(tmp_path / "single" / "many" / f"{number}.png", (0, 0, number))
    (tmp_path / "single" / "a" / "0.txt").write_text("a caption")
    options = {"name": "folder", "path": str(tmp_path / "single"), "size": 8}
    data = create(options)
    assert data._labels["train"].unique().tolist() == list(range(7)) and data.sizes["test"] >= 1
    assert parse(options).left_out() == ".txt files: 1 (a/0.txt)"
    for split in ("train", "val", "test", "extra"):
        for number in range(2):
            picture(tmp_path / "splits" / split / "cat" / f"{number}.png", (number, 0, 0))
    assert parse(options | {"path": str(tmp_path / "splits")}).left_out() == "beside the splits: extra, val"


# --- latents -------------------------------------------------------------------------------------


def load(path, **options):
    return create({"name": "latents", "path": str(path), **options})


def test_labels_far_beyond_the_samples_and_classes_without_samples_are_named(tmp_path):
    shards = tmp_path / "shards"
    shards.mkdir()

    def write(*labels):
        save_file({"latents": torch.randn(len(labels), 4, 8, 8), "labels": torch.tensor(labels)}, shards / "a.safetensors")

    write(0, 1, 920_000)
    refused(lambda: load(shards), "label 920000 and 3 samples", "data.num_classes=920001")
    write(0, 1, 1, 3)
    with pytest.warns(UserWarning, match="1 of 4 classes have no training sample, such as 2"):
        load(shards)
    write(*range(5))
    with pytest.warns(UserWarning, match="2 of 5 classes have no training sample"):
        load(shards, held_out=2)


def test_latents_that_are_not_finite_are_named(tmp_path):
    z = latents(200)
    z[3] = np.nan
    write_store(tmp_path / "s", z[:50], [0] * 50)
    refused(lambda: load(tmp_path / "s"), "1 of 50 samples", "number 3")
    z[3], z[101] = 0, np.inf
    data = load(write_store(tmp_path / "large", z, [0] * 200))  # of which 64 are read at the start
    with pytest.warns(UserWarning, match="sample 101 is not finite"):
        data.batch(torch.tensor([100, 101]))
    data.batch(torch.tensor([100, 101]))  # once


def test_a_store_that_is_cut_while_it_is_in_use_is_named(tmp_path):
    path = write_store(tmp_path / "s", latents(12, side=64), [0] * 12)
    data, shard = load(path), path / "shard-00001.safetensors"
    os.rename(shard, tmp_path / "moved")  # what is mapped stays readable
    assert data.batch(torch.tensor([11])).x.isfinite().all()
    os.rename(tmp_path / "moved", shard)
    size = shard.stat().st_size
    os.truncate(shard, 9000)
    refused(lambda: data.batch(torch.tensor([0, 11])), f"shard-00001.safetensors was cut from {size} to 9000 bytes")
    assert data.batch(torch.tensor([0])).x.isfinite().all()


def test_a_run_on_a_store_that_is_cut_ends_with_one_line(tmp_path, monkeypatch):
    from experiments.training.loop import Trainer

    path = write_store(tmp_path / "s", latents(12, side=64), [0] * 12)
    config = small(tmp_path, "data=latents", f"data.path={path}", "size=T/8")

    def cut_then_report(self, progress):
        os.truncate(path / "shard-00001.safetensors", 9000)

    monkeypatch.setattr(Trainer, "report", cut_then_report)
    refused(lambda: train(config, quiet=True), "was cut from")


# --- images to score -----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["png", "npz", "beside"])
def test_of_a_folder_that_sample_wrote_the_samples_are_read(tmp_path, layout, capsys):
    picture(tmp_path / "grid.png", side=80)
    for number in range(5):
        picture(tmp_path / ("" if layout == "beside" else "png") / f"{number}.png", (number, 0, 0))
    if layout == "npz":
        np.savez(tmp_path / "samples.npz", arr_0=np.zeros((7, 8, 8, 3), np.uint8), arr_1=np.arange(7))
    images = Images(tmp_path)
    assert images.n == (7 if layout == "npz" else 5) and (images.labels() is not None) == (layout == "npz")
    words = [str(tmp_path), "--data", "digits", "--features", "digits-classifier", "--metrics", "precision"]
    assert run_command(evaluate.main, words) == 0
    out = capsys.readouterr().out
    assert ("left out    grid.png" if layout == "beside" else f"images      {images.path}") in out
