"""Fashion-MNIST (Xiao, Rasul and Vollgraf 2017, arXiv 1708.07747): clothes, 28x28 grey, 10 classes.

The checksums are of what the files hold: Debian packs the same bytes anew, so that its files have
others than the published ones.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from experiments.data.data_options import DataError
from experiments.data.fashion_spec import FashionOptions, explained, files_of
from experiments.data.idx_files import NAMES, content, images_and_labels
from experiments.data.pixel_set import PixelSet, Split
from experiments.data.published_files import fetch
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

class Fashion(PixelSet):
    """60,000 training and 10,000 held-out images: the published split."""

    def __init__(
        self, options: FashionOptions, task: str = "class", device: torch.device | str = "cpu"
    ) -> None:
        with explained():
            files = files_of(Path(options.path).expanduser() if options.path else _downloaded())
            splits = {
                split: _read(files[images], files[labels])
                for split, (images, labels) in NAMES.items()
            }
        super().__init__(options, task, device, splits, CLASSES)


def _downloaded() -> Path:
    folder = default_cache() / "fashion"
    if not all((folder / f"{name}.gz").is_file() for name in SHA256):
        from torchvision.datasets import FashionMNIST

        for name, md5 in FashionMNIST.resources:
            fetch([mirror + name for mirror in FashionMNIST.mirrors], folder / name, md5)
    return folder


def _read(images: Path, labels: Path) -> Split:
    """Return one split.

    Raises:
        DataError: A file holds something else than was published.
    """
    found = []
    for path in (images, labels):
        found.append(content(path))
        if hashlib.sha256(found[-1]).hexdigest() != SHA256[path.name.removesuffix(".gz")]:
            raise DataError(
                f"{path} is cut short or is not what was published (its SHA-256 is another)"
            )
    return images_and_labels(found[0], found[1], str(images.parent))
