"""data=torchvision and data=fashion: published files, written here with few random pictures, are read or downloaded."""

import functools
import gzip
import hashlib
import http.server
import os
import pickle
import tarfile
import threading
import zipfile
from pathlib import Path

import hostile
import numpy as np
import pytest
import scipy.io
import torch
from data_tools import idx, refused
from torchvision import datasets

from experiments.data import DataError, create, downloads, torchvision_sets
from experiments.data.image_options import TORCHVISION_SETS
from experiments.data.registry import parse
from experiments.runtime.locks import locked

TRAIN, TEST = 20, 10  # in each of CIFAR-10's five batches
DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # of the package dataset-fashion-mnist


@pytest.fixture
def server(tmp_path_factory):
    """A folder, and the address under which its files can be downloaded."""
    served = tmp_path_factory.mktemp("served")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(served))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield served, f"http://127.0.0.1:{running.server_port}/"
        running.shutdown()


def md5(path):
    return hashlib.md5(path.read_bytes()).hexdigest()


def pictures(name, n):
    """Random pictures in the layout of the set's files, and labels that name every tenth class."""
    random = np.random.default_rng(len(name))
    classes = TORCHVISION_SETS[name].class_count
    shape = (3, 32, 32) if TORCHVISION_SETS[name].shape[0] == 3 else (1, 28, 28)
    return random.integers(0, 256, (n, *shape), dtype=np.uint8), np.arange(n) % classes


def write_cifar(root, dataset_class, monkeypatch):
    folder = root / dataset_class.base_folder
    folder.mkdir(parents=True)
    lists = {"train_list": [], "test_list": []}
    for list_name, n in (("train_list", TRAIN), ("test_list", TEST)):
        for name, _ in getattr(dataset_class, list_name):
            images, labels = pictures(dataset_class.__name__, n)
            rows = {"data": images.reshape(n, -1), "labels": labels.tolist()}
            (folder / name).write_bytes(pickle.dumps(rows, protocol=2))
            lists[list_name].append([name, md5(folder / name)])
    names = [f"class {k}" for k in range(TORCHVISION_SETS[dataset_class.__name__].class_count)]
    meta = folder / dataset_class.meta["filename"]
    meta.write_bytes(pickle.dumps({dataset_class.meta["key"]: names}, protocol=2))
    monkeypatch.setattr(dataset_class, "meta", {**dataset_class.meta, "md5": md5(meta)})
    for list_name, files in lists.items():
        monkeypatch.setattr(dataset_class, list_name, files)


def write_svhn(root, dataset_class, monkeypatch):
    root.mkdir(parents=True, exist_ok=True)
    split_list = {}
    for split, n in (("train", TRAIN), ("test", TEST)):
        address, name, _ = dataset_class.split_list[split]
        images, labels = pictures("SVHN", n)
        rows = {"X": images.transpose(2, 3, 1, 0), "y": np.where(labels, labels, 10)[:, None]}
        scipy.io.savemat(root / name, rows)
        split_list[split] = [address, name, md5(root / name)]
    monkeypatch.setattr(dataset_class, "split_list", split_list)


def write_mnist(root, dataset_class, monkeypatch):
    """MNIST and its relatives, FashionMNIST too."""
    raw = root / dataset_class.__name__ / "raw"
    raw.mkdir(parents=True)
    resources = []
    for (name, _), (k, n) in zip(dataset_class.resources, ((0, TRAIN), (1, TRAIN), (0, TEST), (1, TEST)), strict=True):
        values = pictures(dataset_class.__name__, n)[k]
        (raw / name).write_bytes(gzip.compress(idx(values[:, 0] if k == 0 else values)))
        resources.append((name, md5(raw / name)))
    monkeypatch.setattr(dataset_class, "resources", resources)


def write_emnist(root, dataset_class, monkeypatch):
    path = root / "EMNIST" / "raw" / "gzip.zip"
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as archive:
        for split, n in (("train", TRAIN), ("test", TEST)):
            images, labels = pictures("EMNIST", n)
            for what, values in (("images-idx3", images[:, 0].swapaxes(1, 2)), ("labels-idx1", labels)):
                name = f"gzip/emnist-balanced-{split}-{what}-ubyte.gz"
                archive.writestr(name, gzip.compress(idx(values)))
    monkeypatch.setattr(dataset_class, "md5", md5(path))


def write(root, name, monkeypatch):
    """Write a set as it is published, and put its checksums where torchvision has the real ones."""
    writers = {"CIFAR10": write_cifar, "SVHN": write_svhn, "EMNIST": write_emnist}
    writers.get(name, write_mnist)(root, getattr(datasets, name), monkeypatch)


def options(root, name="CIFAR10", **more):
    return {"name": "torchvision", "set": name, "root": str(root), **more}


@pytest.mark.parametrize("name", ["CIFAR10", "SVHN", "MNIST", "EMNIST"])
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


def test_what_is_known_without_the_files():
    assert parse(options("/x", "CIFAR100")).describe()["num_classes"] == 100
    for name, flip, mirrored in (("CIFAR10", "auto", True), ("CIFAR10", "none", False), ("MNIST", "auto", False)):
        assert parse(options("/x", name, flip=flip)).mirrored is mirrored


def test_nothing_is_unpickled_that_is_not_the_published_file(tmp_path, monkeypatch):
    write(tmp_path, "CIFAR10", monkeypatch)
    mark, path = tmp_path / "mark", tmp_path / "cifar-10-batches-py" / "data_batch_2"
    path.write_bytes(pickle.dumps(hostile.Bomb(mark)))
    refused(
        lambda: create(options(tmp_path)),
        "data_batch_2 is truncated or differs from the published file: its MD5",
        "data.root=FOLDER",
    )
    assert not mark.exists()
    pickle.loads(path.read_bytes())
    assert mark.exists()  # the bomb is one


def test_what_is_missing_is_downloaded_and_said(tmp_path, server, monkeypatch, capsys):
    served, address = server
    write(tmp_path / "made", "CIFAR10", monkeypatch)
    with tarfile.open(served / "cifar-10-python.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "made" / "cifar-10-batches-py", "cifar-10-batches-py")
    dataset_class, root = datasets.CIFAR10, tmp_path / "root"
    monkeypatch.setattr(dataset_class, "url", f"{address}cifar-10-python.tar.gz")
    with pytest.raises(DataError, match=r"cannot download .*tar\.gz.*data\.root=FOLDER"):
        create(options(root))  # it is not the file whose checksum is known
    monkeypatch.setattr(dataset_class, "tgz_md5", md5(served / "cifar-10-python.tar.gz"))
    data = create(options(root))
    assert data.fingerprint == create(options(tmp_path / "made")).fingerprint
    assert f"downloading {dataset_class.url} to {root}" in capsys.readouterr().err
    (served / "cifar-10-python.tar.gz").unlink()
    create(options(root))
    assert not capsys.readouterr().err
    # A process that comes late unpacks what another one reads already: files change as a whole.
    (root / dataset_class.base_folder / "test_batch").unlink()
    with (root / dataset_class.base_folder / "data_batch_1").open("rb") as read:
        before = os.fstat(read.fileno()).st_ino
        create(options(root))
        assert before != (root / dataset_class.base_folder / "data_batch_1").stat().st_ino


# --- data=fashion ----------------------------------------------------------------------------------


def test_fashion_files_are_packed_or_not_and_as_published(tmp_path, monkeypatch):
    write_mnist(tmp_path, datasets.FashionMNIST, monkeypatch)
    folder, checksums = tmp_path / "FashionMNIST" / "raw", {}
    contents = {packed: gzip.decompress(packed.read_bytes()) for packed in folder.iterdir()}
    for packed, content in contents.items():
        checksums[packed.stem] = hashlib.sha256(content).hexdigest()
    monkeypatch.setattr(torchvision_sets, "SHA256", checksums)

    def opened(**task):
        return create({"name": "fashion", "path": str(folder)}, **task)

    data = opened()
    assert data.sizes == {"train": TRAIN, "test": TEST} and data.shape == (1, 32, 32)
    assert data.class_names[9] == "Ankle boot"
    for packed in contents:
        if "labels" in packed.name:
            packed.with_suffix("").write_bytes(contents[packed])
            packed.unlink()
    unpacked = opened(task="none")
    assert unpacked.fingerprint == data.fingerprint and unpacked.batch(torch.arange(3), None).y is None
    for name in ("train-labels-idx1-ubyte", "train-images-idx3-ubyte.gz"):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[:-9])
        refused(opened, f"{name} differs from the published file", "leave data.path out")
        (folder / name).write_bytes(whole)


def test_fashion_is_downloaded_once(tmp_path, server, monkeypatch, capsys):
    dataset_class, (served, address) = datasets.FashionMNIST, server
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_mnist(tmp_path, dataset_class, monkeypatch)
    for path in (tmp_path / "FashionMNIST" / "raw").iterdir():
        path.rename(served / path.name)
    monkeypatch.setattr(dataset_class, "mirrors", [f"{address}nowhere/"])
    refused(lambda: create({"name": "fashion"}), "cannot download", "give data.path=FOLDER")
    monkeypatch.setattr(dataset_class, "mirrors", [address])
    data = create({"name": "fashion"})
    for path in served.iterdir():
        path.unlink()
    capsys.readouterr()
    assert create({"name": "fashion"}).fingerprint == data.fingerprint
    assert "download" not in "".join(capsys.readouterr())


def test_what_another_process_downloads_is_waited_for(tmp_path):
    path = tmp_path / "file"
    digest = hashlib.md5(b"whole").hexdigest()
    waiting = threading.Thread(target=downloads.fetch, args=(["http://127.0.0.1:9/"], path, digest))
    with locked(tmp_path):
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        path.write_bytes(b"whole")
    waiting.join(20)
    assert not waiting.is_alive() and path.read_bytes() == b"whole"


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="needs apt install dataset-fashion-mnist")
def test_the_published_fashion_mnist():
    data = create({"name": "fashion", "path": str(DEBIAN)})
    assert data.sizes == {"train": 60000, "test": 10000}
    for split, each in (("train", 6000), ("test", 1000)):
        y = torch.cat([data.batch(i, None, split).y for i in torch.arange(10 * each).split(5000)])
        assert y.bincount().tolist() == [each] * 10
    # The mean that is published for the images without their margin: 72.94.
    assert abs(data._mean * 32**2 / 28**2 - 72.94) < 0.01
