import gzip
import hashlib
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from data_tools import idx

from experiments.config import load
from experiments.data import DataError, create, downloads, image_options, torchvision_sets
from experiments.runtime.locks import locked

REAL = Path("/usr/share/datasets/fashion-mnist")  # of Debian's package dataset-fashion-mnist
installed = pytest.mark.skipif(not REAL.is_dir(), reason="needs apt install dataset-fashion-mnist")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The four files, written by hand, with their checksums in the place of the published ones."""
    random = np.random.default_rng(0)
    files, sums = {}, {}
    for (images, labels), n in zip(image_options.IDX_FILES.values(), (30, 20), strict=True):
        files[images] = idx(random.integers(0, 256, (n, 28, 28)))
        files[labels] = idx(np.arange(n) % 10)
    for k, (name, data) in enumerate(files.items()):
        sums[name] = hashlib.sha256(data).hexdigest()
        if k % 2:
            (tmp_path / name).write_bytes(data)
        else:
            (tmp_path / f"{name}.gz").write_bytes(gzip.compress(data))
    monkeypatch.setattr(torchvision_sets, "SHA256", sums)
    return tmp_path


def test_packed_and_unpacked_files_are_one_data_set(folder, tmp_path_factory):
    data = create({"name": "fashion", "path": str(folder)})
    assert data.sizes == {"train": 30, "test": 20} and data.shape == (1, 32, 32)
    batch = data.batch(torch.arange(20), None, "test")
    assert batch.y.tolist() == list(range(10)) * 2 and data.class_names[9] == "Ankle boot"
    pixels = data.to_pixels(batch.x)[:, 0]
    packed = gzip.decompress((folder / "t10k-images-idx3-ubyte.gz").read_bytes())
    assert pixels[:, 2:-2, 2:-2].numpy().tobytes() == packed[16:]
    assert pixels.sum() == pixels[:, 2:-2, 2:-2].sum()
    x = data.batch(torch.arange(30), None).x.double()
    assert abs(float(x.mean())) < 1e-6 and abs(float(x.std(correction=0)) - 0.5) < 1e-6
    plain = tmp_path_factory.mktemp("plain")
    for name in torchvision_sets.SHA256:
        path = folder / name
        there = path.is_file()
        (plain / name).write_bytes(
            path.read_bytes() if there else gzip.decompress((folder / f"{name}.gz").read_bytes())
        )
    again = create({"name": "fashion", "path": str(plain)}, task="none")
    assert again.fingerprint == data.fingerprint and again.batch(torch.arange(3), None).y is None


IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (IMAGES, None, "there is no train-images-idx3-ubyte or train-images-idx3-ubyte.gz in"),
        (IMAGES, lambda data: b"\x1f\x8b" + data[3:], "differs from the published file"),
        (LABELS, lambda data: data[:-1] + b"\7", "differs from the published file"),
    ],
)
def test_a_file_that_is_not_as_published_is_one_sentence(folder, name, change, words):
    path = folder / name
    data = path.read_bytes()
    path.unlink()
    if change:
        path.write_bytes(change(data))
    with pytest.raises(DataError, match=words) as error:
        create({"name": "fashion", "path": str(folder)})
    said = str(error.value)
    assert "\n" not in said and "data.path=FOLDER" in said and "leave data.path out" in said


def test_what_is_missing_is_downloaded_once(folder, server, tmp_path_factory, monkeypatch, capsys):
    from torchvision.datasets import FashionMNIST

    (served, address), cache = server, tmp_path_factory.mktemp("cache")
    for name in torchvision_sets.SHA256:
        path = folder / name
        data = gzip.compress(path.read_bytes()) if path.is_file() else None
        (served / f"{name}.gz").write_bytes(data or (folder / f"{name}.gz").read_bytes())
    files = {p.name: hashlib.md5(p.read_bytes()).hexdigest() for p in served.iterdir()}
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(FashionMNIST, "resources", list(files.items()))
    monkeypatch.setattr(FashionMNIST, "mirrors", [f"{address}nowhere/"])
    with pytest.raises(DataError, match=r"cannot download .*give data\.path=FOLDER") as error:
        create({"name": "fashion"})
    assert "\n" not in str(error.value)
    monkeypatch.setattr(FashionMNIST, "mirrors", [address])
    data = create({"name": "fashion"})
    assert data.fingerprint == create({"name": "fashion", "path": str(folder)}).fingerprint
    for path in served.iterdir():
        path.unlink()
    capsys.readouterr()
    assert create({"name": "fashion"}).fingerprint == data.fingerprint
    assert "download" not in "".join(capsys.readouterr())
    # What is damaged in our own cache is there, so it is not downloaded: the way out is to delete it.
    images = cache / "tread-suite" / "fashion" / IMAGES
    whole = images.read_bytes()
    images.write_bytes(whole[:-9])
    with pytest.raises(DataError, match=f"{images} is truncated .* delete it, and it is download"):
        create({"name": "fashion"})


def test_what_another_process_downloads_is_waited_for(tmp_path):
    path = tmp_path / "file"
    waiting = threading.Thread(target=downloads.fetch, args=(["http://127.0.0.1:9/"], path, "0"))
    with locked(tmp_path):
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        path.write_bytes(b"whole")
    waiting.join(20)
    assert not waiting.is_alive() and path.read_bytes() == b"whole"


def test_where_the_files_are_does_not_name_the_run():
    one, other = (load(["data=fashion", f"data.path={path}"]) for path in ("/a", "/b"))
    assert one.name == other.name == load(["data=fashion"]).name and "T4-fashion" in one.name


@installed
def test_the_published_data_set():
    data = create({"name": "fashion", "path": str(REAL)})
    assert data.sizes == {"train": 60000, "test": 10000}
    for split, each in (("train", 6000), ("test", 1000)):
        y = torch.cat([data.batch(i, None, split).y for i in torch.arange(10 * each).split(5000)])
        assert y.bincount().tolist() == [each] * 10
    # The mean that is published for the images without their margin: 72.94.
    assert abs(data._mean * 32**2 / 28**2 - 72.94) < 0.01
