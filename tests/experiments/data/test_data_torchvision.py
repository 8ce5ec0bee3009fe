import gzip
import hashlib
import os
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch
from data_tools import idx
from torchvision import datasets

from experiments.data import DataError, create
from experiments.data.image_options import TORCHVISION_SETS
from experiments.data.registry import describe, parse
from routing.errors import UserError
from routing.rng import Draws

TRAIN, TEST = 20, 10  # in each of CIFAR-10's five batches


def md5(path):
    return hashlib.md5(path.read_bytes()).hexdigest()


def pictures(name, n):
    """Random pictures in the layout of the set's files, and labels that name every tenth class."""
    random = np.random.default_rng(len(name))
    classes = TORCHVISION_SETS[name].class_count
    shape = (3, 32, 32) if TORCHVISION_SETS[name].shape[0] == 3 else (1, 28, 28)
    return random.integers(0, 256, (n, *shape), dtype=np.uint8), np.arange(n) % classes


def write_cifar(root, kind, monkeypatch):
    fine = kind is datasets.CIFAR100
    folder = root / kind.base_folder
    folder.mkdir(parents=True)
    lists = {"train_list": [], "test_list": []}
    for which, n in (("train_list", TRAIN), ("test_list", TEST)):
        for name, _ in getattr(kind, which):
            images, labels = pictures(kind.__name__, n)
            key = "fine_labels" if fine else "labels"
            rows = {"data": images.reshape(n, -1), key: labels.tolist()}
            (folder / name).write_bytes(pickle.dumps(rows, protocol=2))
            lists[which].append([name, md5(folder / name)])
    names = [f"class {k}" for k in range(TORCHVISION_SETS[kind.__name__].class_count)]
    meta = folder / kind.meta["filename"]
    meta.write_bytes(pickle.dumps({kind.meta["key"]: names}, protocol=2))
    monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": md5(meta)})
    for which, files in lists.items():
        monkeypatch.setattr(kind, which, files)


def write_svhn(root, kind, monkeypatch):
    root.mkdir(parents=True, exist_ok=True)
    known = {}
    for split, n in (("train", TRAIN), ("test", TEST)):
        address, name, _ = kind.split_list[split]
        images, labels = pictures("SVHN", n)
        rows = {"X": images.transpose(2, 3, 1, 0), "y": np.where(labels, labels, 10)[:, None]}
        scipy.io.savemat(root / name, rows)
        known[split] = [address, name, md5(root / name)]
    monkeypatch.setattr(kind, "split_list", known)


def write_mnist(root, kind, monkeypatch):
    raw = root / kind.__name__ / "raw"
    raw.mkdir(parents=True)
    known = []
    for (name, _), (k, n) in zip(kind.resources, ((0, TRAIN), (1, TRAIN), (0, TEST), (1, TEST)), strict=True):
        values = pictures(kind.__name__, n)[k]
        (raw / name).write_bytes(gzip.compress(idx(values[:, 0] if k == 0 else values)))
        known.append((name, md5(raw / name)))
    monkeypatch.setattr(kind, "resources", known)


def write_emnist(root, kind, monkeypatch):
    path = root / "EMNIST" / "raw" / "gzip.zip"
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as archive:
        for split, n in (("train", TRAIN), ("test", TEST)):
            images, labels = pictures("EMNIST", n)
            for what, values in (("images-idx3", images[:, 0].swapaxes(1, 2)), ("labels-idx1", labels)):
                name = f"gzip/emnist-balanced-{split}-{what}-ubyte.gz"
                archive.writestr(name, gzip.compress(idx(values)))
    monkeypatch.setattr(kind, "md5", md5(path))


def write(root, name, monkeypatch):
    """Write a set as it is published, and put its checksums where torchvision has the real ones."""
    ways = {"CIFAR10": write_cifar, "CIFAR100": write_cifar, "SVHN": write_svhn, "EMNIST": write_emnist}
    ways.get(name, write_mnist)(root, getattr(datasets, name), monkeypatch)


def options(root, name="CIFAR10", **more):
    return {"name": "torchvision", "set": name, "root": str(root), **more}


@pytest.mark.parametrize("name", ["CIFAR10", "CIFAR100", "SVHN", "MNIST", "EMNIST"])
def test_published_files_are_read(tmp_path, monkeypatch, name):
    write(tmp_path, name, monkeypatch)
    data = create(options(tmp_path, name))
    shape, classes = TORCHVISION_SETS[name].shape, TORCHVISION_SETS[name].class_count
    batches = 5 if name == "CIFAR10" else 1
    assert data.sizes == {"train": TRAIN * batches, "test": TEST}
    assert data.shape == shape and data.num_classes == classes == len(data.class_names)
    images, labels = pictures(name, TEST)
    batch = data.batch(torch.arange(TEST), None, "test")
    assert batch.y.tolist() == labels.tolist()
    pixels, margin = data.to_pixels(batch.x).numpy(), (32 - images.shape[-1]) // 2
    inner = pixels[:, :, margin : 32 - margin, margin : 32 - margin]
    assert (inner == images).all() and inner.sum() == pixels.sum()


def test_training_images_are_mirrored_as_asked(tmp_path, monkeypatch):
    write(tmp_path, "CIFAR10", monkeypatch)
    index = torch.arange(5 * TRAIN)
    draws = Draws(0, 3, index)
    for flip, some in (("auto", True), ("mirror", True), ("none", False)):
        data = create(options(tmp_path, flip=flip))
        plain, seen = data.batch(index, None).x, data.batch(index, draws).x
        same = (seen == plain).flatten(1).all(1)
        assert ((seen == plain.flip(-1)).flatten(1).all(1) | same).all()
        assert bool(same.all()) is not some and bool(same.any())
        assert torch.equal(data.batch(index[7:9], Draws(0, 3, index[7:9])).x, seen[7:9])
        held = [data.batch(index[:9], d, "test").x for d in (Draws(0, 3, index[:9]), None)]
        assert torch.equal(*held)
    write(tmp_path, "MNIST", monkeypatch)
    data = create(options(tmp_path, "MNIST"))
    assert torch.equal(data.batch(index[:9], draws).x, data.batch(index[:9], None).x)


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_nothing_is_unpickled_that_is_not_the_published_file(tmp_path, monkeypatch):
    write(tmp_path, "CIFAR10", monkeypatch)
    mark, path = tmp_path / "mark", tmp_path / "cifar-10-batches-py" / "data_batch_2"
    path.write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(DataError, match="data_batch_2 is truncated or differs from the published file: its MD5") as e:
        create(options(tmp_path))
    assert not mark.exists() and "\n" not in str(e.value) and "data.root=FOLDER" in str(e.value)
    pickle.loads(path.read_bytes())
    assert mark.exists()  # the bomb is one


def test_what_is_missing_is_downloaded_and_said(tmp_path, server, monkeypatch, capsys):
    served, address = server
    write(tmp_path / "made", "CIFAR10", monkeypatch)
    with tarfile.open(served / "cifar-10-python.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "made" / "cifar-10-batches-py", "cifar-10-batches-py")
    kind, root = datasets.CIFAR10, tmp_path / "root"
    monkeypatch.setattr(kind, "url", f"{address}cifar-10-python.tar.gz")
    with pytest.raises(DataError, match=r"cannot download .*tar\.gz.*data\.root=FOLDER"):
        create(options(root))  # it is not the file whose checksum is known
    monkeypatch.setattr(kind, "tgz_md5", md5(served / "cifar-10-python.tar.gz"))
    data = create(options(root))
    assert data.fingerprint == create(options(tmp_path / "made")).fingerprint
    assert f"downloading {kind.url} to {root}" in capsys.readouterr().err
    (served / "cifar-10-python.tar.gz").unlink()
    create(options(root))
    assert not capsys.readouterr().err
    # A process that comes late unpacks what another one reads already: files change as a whole.
    (root / kind.base_folder / "test_batch").unlink()
    with (root / kind.base_folder / "data_batch_1").open("rb") as read:
        before = os.fstat(read.fileno()).st_ino
        create(options(root))
        assert before != (root / kind.base_folder / "data_batch_1").stat().st_ino


def test_a_set_is_described_without_its_files_and_a_wrong_name_is_refused():
    assert describe({"name": "torchvision", "set": "CIFAR100", "root": "/x"})["num_classes"] == 100
    with pytest.raises(UserError, match=r"data\.set=cifar10: .*did you mean CIFAR10\?"):
        parse({"name": "torchvision", "set": "cifar10"})
