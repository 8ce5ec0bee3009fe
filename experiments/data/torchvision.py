"""Data sets that torchvision downloads, from the files as they were published.

CIFAR is published as pickled files, which can run any code when they are read. So every file is
first compared with the checksum that torchvision has for it, and refused if it is another.
"""

from __future__ import annotations

import gzip
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchvision import datasets
from torchvision.datasets.utils import extract_archive

from experiments.data.data_options import DataError
from experiments.data.idx_files import NAMES, content, images_and_labels
from experiments.data.pixel_set import PixelSet, Split
from experiments.data.published_files import check, fetch
from experiments.data.torchvision_spec import TorchvisionOptions
from experiments.runtime.files import default_cache

_WAYS = "data.root=FOLDER is where torchvision puts it, and what is not there is downloaded"


class Torchvision(PixelSet):
    """A set of `torchvision_spec.SETS`, with its published split."""

    def __init__(
        self, options: TorchvisionOptions, task: str = "class", device: torch.device | str = "cpu"
    ) -> None:
        root = Path(options.root).expanduser() if options.root else default_cache() / "torchvision"
        kind = getattr(datasets, options.set)
        read = {"CIFAR10": _cifar, "CIFAR100": _cifar, "SVHN": _svhn, "EMNIST": _emnist}
        try:
            splits, names = read.get(options.set, _mnist)(kind, root)
        except DataError as error:
            raise DataError(f"data=torchvision data.set={options.set}: {error}; {_WAYS}") from None
        super().__init__(options, task, device, splits, names, mirrored=options.mirrored)


def _cifar(kind: Any, root: Path) -> tuple[dict[str, Split], Sequence[str]]:
    meta = (kind.meta["filename"], kind.meta["md5"])
    files = {
        root / kind.base_folder / name: md5
        for name, md5 in (*kind.train_list, *kind.test_list, meta)
    }
    if not all(path.is_file() for path in files):
        archive = root / kind.filename
        fetch([kind.url], archive, kind.tgz_md5)
        check(archive, kind.tgz_md5)
        extract_archive(archive, root)
    for path, md5 in files.items():
        check(path, md5)
    made = {split: kind(root, train=split == "train") for split in NAMES}
    splits = {k: (s.data.transpose(0, 3, 1, 2), np.array(s.targets)) for k, s in made.items()}
    return splits, made["train"].classes


def _svhn(kind: Any, root: Path) -> tuple[dict[str, Split], Sequence[str]]:
    splits = {}
    for split in NAMES:
        address, name, md5 = kind.split_list[split]
        fetch([address], root / name, md5)
        check(root / name, md5)
        made = kind(root, split=split)
        splits[split] = made.data, made.labels
    return splits, [str(digit) for digit in range(10)]


def _mnist(kind: Any, root: Path) -> tuple[dict[str, Split], Sequence[str]]:
    raw = root / kind.__name__ / "raw"
    for name, md5 in kind.resources:
        fetch([mirror + name for mirror in kind.mirrors], raw / name, md5)
        check(raw / name, md5)
    splits = {}
    for split, names in NAMES.items():
        images, labels = (content(raw / f"{name}.gz") for name in names)
        splits[split] = images_and_labels(images, labels, str(raw))
    return splits, kind.classes


def _emnist(kind: Any, root: Path) -> tuple[dict[str, Split], Sequence[str]]:
    path = root / "EMNIST" / "raw" / Path(kind.url).name
    fetch([kind.url], path, kind.md5)
    check(path, kind.md5)
    splits = {}
    with zipfile.ZipFile(path) as archive:
        for split in NAMES:
            images, labels = (
                gzip.decompress(archive.read(f"gzip/emnist-balanced-{split}-{what}-ubyte.gz"))
                for what in ("images-idx3", "labels-idx1")
            )
            pixels, classes = images_and_labels(images, labels, str(path))
            # Published in column order: as they are, the letters lie on their side.
            splits[split] = pixels.swapaxes(2, 3), classes
    return splits, kind.classes_split_dict["balanced"]
