"""Data sets that torchvision downloads, from the files as they were published.

CIFAR is published as pickled files, which can run any code when they are read. So every file is
first compared with the checksum that torchvision has for it, and refused if it is another.
"""

from __future__ import annotations

import gzip
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from experiments.data import published_files as published
from experiments.data.data_options import DataError
from experiments.runtime.files import atomic_write, default_cache
from experiments.runtime.option_types import Key

_WAYS = "data.root=FOLDER is where torchvision puts it, and what is not there is downloaded"
_COLOUR, _GREY = (3, 32, 32), (1, 32, 32)

#: Shape (grey ones are 28x28 with a margin of two), classes, and whether a mirrored picture is
#: another one of its class.
SETS: dict[str, tuple[tuple[int, int, int], int, bool]] = {
    "CIFAR10": (_COLOUR, 10, True),
    "CIFAR100": (_COLOUR, 100, True),
    "SVHN": (_COLOUR, 10, False),
    "MNIST": (_GREY, 10, False),
    "FashionMNIST": (_GREY, 10, False),
    "KMNIST": (_GREY, 10, False),
    # Its `balanced` split: digits and letters.
    "EMNIST": (_GREY, 47, False),
}


@dataclass(frozen=True)
class TorchvisionOptions(published.ImageOptions):
    """A small data set as torchvision downloads it: CIFAR-10 and -100, SVHN, MNIST and its kin.

    `experiments/conf/data/torchvision.yaml` explains each option.
    """

    name: str = "torchvision"
    set: Annotated[str, Key(among=tuple(SETS))] = "CIFAR10"
    root: str | None = None
    flip: Annotated[str, Key(among=("auto", "mirror", "none"))] = "auto"

    sample_shape = _COLOUR
    class_count = 10
    patch = 4
    places = ("root",)
    evaluation = "torchvision"

    def __post_init__(self) -> None:
        super().__post_init__()
        shape, classes, mirrored = SETS[self.set]
        object.__setattr__(self, "sample_shape", shape)
        object.__setattr__(self, "class_count", classes)
        mirrored = mirrored if self.flip == "auto" else self.flip == "mirror"
        object.__setattr__(self, "mirrored", mirrored)

    def read(self) -> published.LabelledImages:
        """Return the published split."""
        from torchvision import datasets

        root = Path(self.root).expanduser() if self.root else default_cache() / "torchvision"
        read = {"CIFAR10": _cifar, "CIFAR100": _cifar, "SVHN": _svhn, "EMNIST": _emnist}
        try:
            found = read.get(self.set, _mnist)(getattr(datasets, self.set), root)
            return published.LabelledImages(*found)
        except DataError as error:
            raise DataError(f"data=torchvision data.set={self.set}: {error}; {_WAYS}") from None


def _cifar(kind: Any, root: Path) -> tuple[dict[str, published.Split], Sequence[str]]:
    listed = [*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])]
    files = {root / kind.base_folder / name: md5 for name, md5 in listed}
    if not all(path.is_file() for path in files):
        archive = root / kind.filename
        published.fetch([kind.url], archive, kind.tgz_md5)
        published.check(archive, kind.tgz_md5)
        with tarfile.open(archive) as packed:
            for member in packed:
                path, content = root / member.name, packed.extractfile(member)
                if path in files and content is not None:
                    atomic_write(path, content.read())  # several processes may unpack it at once
    for path, md5 in files.items():
        published.check(path, md5)
    made = {split: kind(root, train=split == "train") for split in published.NAMES}
    splits = {k: (s.data.transpose(0, 3, 1, 2), np.array(s.targets)) for k, s in made.items()}
    return splits, made["train"].classes


def _svhn(kind: Any, root: Path) -> tuple[dict[str, published.Split], Sequence[str]]:
    splits = {}
    for split in published.NAMES:
        address, name, md5 = kind.split_list[split]
        published.fetch([address], root / name, md5)
        published.check(root / name, md5)
        made = kind(root, split=split)
        splits[split] = made.data, made.labels
    return splits, [str(digit) for digit in range(10)]


def _mnist(kind: Any, root: Path) -> tuple[dict[str, published.Split], Sequence[str]]:
    raw = root / kind.__name__ / "raw"
    for name, md5 in kind.resources:
        published.fetch([mirror + name for mirror in kind.mirrors], raw / name, md5)
        published.check(raw / name, md5)
    splits = published.splits_of(lambda name: published.content(raw / f"{name}.gz"), str(raw))
    return splits, kind.classes


def _emnist(kind: Any, root: Path) -> tuple[dict[str, published.Split], Sequence[str]]:
    path = root / "EMNIST" / "raw" / Path(kind.url).name
    published.fetch([kind.url], path, kind.md5)
    published.check(path, kind.md5)
    with zipfile.ZipFile(path) as archive:

        def read(name: str) -> bytes:
            packed = archive.read(f"gzip/emnist-balanced-{name.replace('t10k', 'test')}.gz")
            return gzip.decompress(packed)

        splits = published.splits_of(read, str(path))
    # Published in column order: as they are, the letters lie on their side.
    splits = {split: (x.swapaxes(2, 3), y) for split, (x, y) in splits.items()}
    return splits, kind.classes_split_dict["balanced"]
