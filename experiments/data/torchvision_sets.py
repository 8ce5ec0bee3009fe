"""Data sets in torchvision's formats: Fashion-MNIST, MNIST and relatives, CIFAR, SVHN.

CIFAR is published as pickled files, which can run any code when they are read: a file whose
checksum differs from the published one is refused unread. IDX is the format of MNIST's files
(LeCun, Cortes and Burges): a magic number, sizes, bytes.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from experiments.data.data_options import DataError, require
from experiments.data.downloads import check_published, fetch
from experiments.data.image_options import (
    FASHION_HELP,
    IDX_FILES,
    FashionOptions,
    TorchvisionOptions,
)
from experiments.data.image_sets import LabelledImages, Split
from experiments.runtime.files import atomic_write, default_cache

#: SHA-256 of Fashion-MNIST's unpacked files: Debian recompresses the same bytes.
SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}


def read_fashion(options: FashionOptions) -> LabelledImages:
    """Read Fashion-MNIST from a folder of IDX files, or download it."""
    from torchvision.datasets import FashionMNIST

    if not options.path:
        try:
            return _read_idx_set(FashionMNIST, default_cache() / "fashion")
        except DataError as error:
            raise DataError(f"{error}; or give data.path=FOLDER with the four IDX files") from None
    files = options.files()

    def read_file(name: str) -> bytes:
        data = files[name].read_bytes()
        if files[name].suffix == ".gz":
            # A damaged archive is refused below, because its checksum differs.
            with contextlib.suppress(OSError, EOFError, zlib.error):
                data = gzip.decompress(data)
        require(
            hashlib.sha256(data).hexdigest() == SHA256[name],
            f"{files[name]} differs from the published file (its SHA-256); {FASHION_HELP}",
        )
        return data

    return LabelledImages(_read_idx_splits(read_file), FashionMNIST.classes)


def read_torchvision(options: TorchvisionOptions) -> LabelledImages:
    """Read one of torchvision's data sets; missing files are downloaded."""
    from torchvision import datasets

    root = Path(options.root).expanduser() if options.root else default_cache() / "torchvision"
    readers = {
        "CIFAR10": _read_cifar,
        "CIFAR100": _read_cifar,
        "SVHN": _read_svhn,
        "EMNIST": _read_emnist,
    }
    dataset_class = getattr(datasets, options.set)
    try:
        if options.set in readers:
            return readers[options.set](dataset_class, root)
        return _read_idx_set(dataset_class, root / options.set / "raw")
    except DataError as error:
        raise DataError(
            f"data=torchvision data.set={options.set}: {error}; data.root=FOLDER is where "
            "torchvision puts it, and missing files are downloaded"
        ) from None


def _read_cifar(dataset_class: Any, root: Path) -> LabelledImages:
    meta = dataset_class.meta
    checksums = {}
    for name, md5 in [
        *dataset_class.train_list,
        *dataset_class.test_list,
        (meta["filename"], meta["md5"]),
    ]:
        checksums[root / dataset_class.base_folder / name] = md5
    if not all(path.is_file() for path in checksums):
        archive = root / dataset_class.filename
        fetch([dataset_class.url], archive, dataset_class.tgz_md5)
        with tarfile.open(archive) as packed:
            for member in packed:
                path, content = root / member.name, packed.extractfile(member)
                if path in checksums and content is not None:
                    atomic_write(path, content.read())  # several processes may unpack it at once
    for path, md5 in checksums.items():
        check_published(path, md5)
    splits: dict[str, Split] = {}
    for split in IDX_FILES:
        dataset = dataset_class(root, train=split == "train")
        splits[split] = dataset.data.transpose(0, 3, 1, 2), np.array(dataset.targets)
    return LabelledImages(splits, dataset.classes)


def _read_svhn(dataset_class: Any, root: Path) -> LabelledImages:
    splits: dict[str, Split] = {}
    for split in IDX_FILES:
        address, name, md5 = dataset_class.split_list[split]
        fetch([address], root / name, md5)
        dataset = dataset_class(root, split=split)
        splits[split] = dataset.data, dataset.labels
    return LabelledImages(splits, list(map(str, range(10))))


def _read_emnist(dataset_class: Any, root: Path) -> LabelledImages:
    path = root / "EMNIST" / "raw" / Path(dataset_class.url).name
    fetch([dataset_class.url], path, dataset_class.md5)
    with zipfile.ZipFile(path) as archive:

        def read_file(name: str) -> bytes:
            name = name.replace("t10k", "test")
            return gzip.decompress(archive.read(f"gzip/emnist-balanced-{name}.gz"))

        splits = _read_idx_splits(read_file)
    # Published in column order, which shows the letters transposed.
    for split, (images, labels) in splits.items():
        splits[split] = images.swapaxes(2, 3), labels
    return LabelledImages(splits, dataset_class.classes_split_dict["balanced"])


def _read_idx_set(dataset_class: Any, folder: Path) -> LabelledImages:
    for name, md5 in dataset_class.resources:
        addresses = [mirror + name for mirror in dataset_class.mirrors]
        fetch(addresses, folder / name, md5)
    splits = _read_idx_splits(lambda name: gzip.decompress((folder / f"{name}.gz").read_bytes()))
    return LabelledImages(splits, dataset_class.classes)


def _read_idx_splits(read_file: Callable[[str], bytes]) -> dict[str, Split]:
    """Return images (N, 1, H, W) and labels (N,), uint8, of each split."""
    splits = {}
    for split, (image_file, label_file) in IDX_FILES.items():
        splits[split] = (
            _parse_idx(read_file(image_file))[:, None],
            _parse_idx(read_file(label_file)),
        )
    return splits


def _parse_idx(data: bytes) -> np.ndarray:
    """Parse IDX: two zeros, the type, the number of dimensions, the sizes, the values."""
    dimensions = data[3]
    sizes = struct.unpack_from(f">{dimensions}I", data, 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(sizes)
