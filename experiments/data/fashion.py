"""Fashion-MNIST (Xiao, Rasul and Vollgraf 2017, arXiv 1708.07747): clothes, 28x28 grey, 10 classes.

The checksums are of what the files hold: Debian packs the same bytes anew, so that its files have
others than the published ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from experiments.data import published_files as published
from experiments.data.data_options import DataError
from experiments.runtime.files import default_cache

CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
    "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip

#: SHA-256 of the unpacked files.
SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
_FOLDER = (
    "give data.path=FOLDER with its four IDX files (Debian's package dataset-fashion-mnist is such "
    "a folder, /usr/share/datasets/fashion-mnist)"
)
_WAYS = f"{_FOLDER}, or leave data.path out to download them"
_AGAIN = f"delete it, and it is downloaded again, or {_FOLDER}"  # of a file of our own cache


@dataclass(frozen=True)
class FashionOptions(published.ImageOptions):
    """Fashion-MNIST (Xiao et al. 2017): 70,000 pictures of clothes, 28x28 grey in 32x32."""

    name: str = "fashion"
    path: str | None = None  # folder with the four IDX files; None: downloaded once

    sample_shape = (1, 32, 32)
    class_count = 10
    patch = 4
    p_mean = 0.0
    places = ("path",)
    evaluation = "fashion"

    def check(self) -> None:
        """Refuse a folder in which a file is missing; without one, they are downloaded."""
        if self.path:
            with explained():
                files_of(Path(self.path).expanduser())

    def read(self) -> published.LabelledImages:
        """Return 60,000 training and 10,000 held-out images: the published split."""
        with explained():
            folder = Path(self.path).expanduser() if self.path else _downloaded()
        with explained(_WAYS if self.path else _AGAIN):
            held = {}
            for name, path in files_of(folder).items():
                held[name] = published.content(path)
                if hashlib.sha256(held[name]).hexdigest() != SHA256[name]:
                    why = "is cut short or is not what was published (its SHA-256 is another)"
                    raise DataError(f"{path} {why}")
            splits = published.splits_of(held.__getitem__, str(folder))
        return published.LabelledImages(splits, CLASSES)


def files_of(folder: Path) -> dict[str, Path]:
    """Return the four files by their published names, packed or not."""
    found = {}
    for name in itertools.chain(*published.NAMES.values()):
        path = next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)
        if path is None:
            raise DataError(f"there is no {name} or {name}.gz in {folder}")
        found[name] = path
    return found


@contextlib.contextmanager
def explained(ways: str = _WAYS) -> Iterator[None]:
    """Add to what is wrong with the files whose they are, and how to get them."""
    try:
        yield
    except DataError as error:
        raise DataError(f"data=fashion: {error}; {ways}") from None


def _downloaded() -> Path:
    folder = default_cache() / "fashion"
    if not all((folder / f"{name}.gz").is_file() for name in SHA256):
        from torchvision.datasets import FashionMNIST

        for name, md5 in FashionMNIST.resources:
            published.fetch([mirror + name for mirror in FashionMNIST.mirrors], folder / name, md5)
    return folder
