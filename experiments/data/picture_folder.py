"""data=folder: a user's own pictures, in class folders or in one folder (no torch here).

They are cropped to one size and held in memory as 8-bit pixels. Folders, splits, links and damaged
files are treated as `experiments/prepare.py` treats them.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from annotated_types import Ge, Le
from PIL import Image

from experiments.data.class_folders import LABEL_FILE
from experiments.data.data_options import (
    PICTURES,
    DataError,
    contents_lines,
    require,
    warn_of_empty_classes,
)
from experiments.data.image_options import SplitOptions
from experiments.data.image_sets import LabelledImages, Split
from experiments.data.image_sources import FolderSource
from experiments.data.open_source import list_files, open_source
from experiments.data.raw_images import crop_ahead
from experiments.data.stratified_split import stratified_rows
from experiments.runtime.digest import File, picture_ends, sampled
from experiments.runtime.files import is_system_file

#: Pixels of more bytes are refused: a run holds them in memory, and two copies while it starts.
MAX_BYTES = 4 * 10**9
_TRAIN_FOLDERS = ("train", "training")
_TEST_FOLDERS = ("test", "testing", "val", "valid", "validation")
# Encoded pictures that wait to be decoded; photographs may have tens of megabytes each.
_READ_AHEAD = 16


class FolderSplits(NamedTuple):
    """The pictures of a folder, listed but not decoded."""

    train: FolderSource  # all pictures if there is no `test`
    test: FolderSource | None
    class_names: tuple[str, ...]  # () for unlabelled pictures
    beside: tuple[str, ...] = ()  # folders beside those of the splits, which are not read


@dataclass(frozen=True)
class FolderOptions(SplitOptions):
    """Your own pictures as pixels in memory: one subfolder for each class, or one folder.

    Subfolders train/ and test/ (or val/) are the published split; otherwise a share of every class
    is held out.
    """

    name: str = "folder"
    path: Annotated[
        str | None,
        "Folder with one subfolder of pictures for each class, with such folders in train/ and "
        "test/ (or val/), or with unlabelled pictures (task=none guidance=none). Required: "
        "data.path=DIR.",
    ] = None
    size: Annotated[
        int,
        Ge(4),
        Le(512),
        "Side of the images in pixels: the shorter side is resized to it, the centre cropped.",
    ] = 32
    channels: Annotated[Literal[3, 1], "3: RGB; 1: grey."] = 3
    flip: Annotated[Literal["none", "mirror"], "mirror: mirror half of the training images."] = (
        "none"
    )

    location_keys = ("path",)
    # Assumed while there is no folder.
    class_count = 1
    patch = 4

    def __post_init__(self) -> None:
        object.__setattr__(self, "sample_shape", (self.channels, self.size, self.size))
        object.__setattr__(self, "mirrored", self.flip == "mirror")

    @functools.cached_property
    def splits(self) -> FolderSplits:
        """The pictures and their classes, listed once for each options object.

        Raises:
            DataError: The folder is missing, holds fewer than two pictures or more than memory
                should hold, or its layout is not supported.
        """
        require(
            bool(self.path and self.path.strip()),
            "data=folder needs your pictures: data.path=DIR with one subfolder for each class",
        )
        root = Path(str(self.path)).expanduser()
        require(
            root.is_dir(),
            f"data.path={self.path} is no folder; expected one with a subfolder of pictures for "
            "each class",
        )
        train_folder, test_folder, beside = _split_folders(root)
        train, test = _open_pictures(train_folder), None
        class_names = _class_names(train)
        if test_folder is not None:
            test = _open_pictures(test_folder)
            missing = sorted(set(_class_names(test)) - set(class_names))
            require(
                test.labelled == train.labelled and not missing,
                f"{test_folder} holds {'the class ' + missing[0] if missing else 'no classes'}, "
                f"unlike {train_folder}; expected the same class folders in both",
            )
        self._check_count(train.count + (test.count if test else 0))
        return FolderSplits(train, test, class_names, beside)

    def describe(self) -> dict[str, Any]:
        """Return the description, with the number of class folders where the folder exists.

        Raises:
            DataError: The folder exists, and its layout is not supported.
        """
        description = super().describe()
        if self.path and Path(self.path).expanduser().is_dir():
            description["num_classes"] = len(self.splits.class_names)
        return description

    def fingerprint(self) -> str:
        """Return a checksum of the names and sizes of the pictures."""
        root = Path(str(self.path)).expanduser()
        if not self.path or not root.is_dir():
            return "absent"
        digest = hashlib.sha256()
        for name, file in _files_that_count(root):
            size = file.stat().st_size if file.exists() else -1  # a broken link
            digest.update(f"{name} {size}\n".encode(errors="replace"))
        return digest.hexdigest()[:16]

    def content_files(self) -> list[File]:
        """Return the pictures, of which the ends are read, and the file of their labels."""
        files = []
        for name, file in _files_that_count(Path(str(self.path)).expanduser()):
            read = sampled if file.name == LABEL_FILE else picture_ends
            files.append(File(name, str(file), read))
        return files

    def check_files(self) -> None:
        """Raise `DataError` for pictures that `splits` refuses."""
        _ = self.splits

    def contents_lines(self, task: str) -> list[str]:
        """Return the line on pictures and classes; it also counts unreadable pictures."""
        splits = self.splits
        if splits.test is not None:
            held_out, training = splits.test.count, splits.train.count
        else:
            held_out = math.ceil(self.test_fraction * splits.train.count)
            training = splits.train.count - held_out
        return contents_lines({"train": training, "test": held_out}, splits.class_names, task)

    def left_out(self) -> str:
        """Return files that are no pictures, and folders beside those of the splits."""
        splits = self.splits
        parts = [str(source.left_out) for source in (splits.train, splits.test) if source]
        if splits.beside:
            parts.append(f"beside the splits: {', '.join(splits.beside)}")
        return "; ".join(filter(None, parts))

    def _check_count(self, count: int) -> None:
        """Refuse more pixels than `MAX_BYTES`, and a single picture."""
        size = count * self.channels * self.size**2
        require(
            size <= MAX_BYTES,
            f"data.size={self.size}: {count:,} pictures of {self.path} are {size / 1e9:.1f} GB as "
            f"pixels; expected at most {MAX_BYTES / 1e9:g} GB, as data=folder holds them in "
            "memory: choose a smaller data.size, or train on latents (python "
            f"experiments/prepare.py {self.path} OUT, then data=latents data.path=OUT)",
        )
        require(count > 1, f"{self.path} holds one picture; expected more, as some are held out")

    def read(self) -> LabelledImages:
        """Decode all pictures, as uint8 (N, C, size, size) and labels (N,) of each split."""
        splits = self.splits
        train = _read_pictures(self, splits.train, splits.class_names)
        if splits.test is not None:
            test = _read_pictures(self, splits.test, splits.class_names)
        else:
            images, labels = train
            require(
                len(labels) > 1,
                f"{self.path} holds {len(labels)} readable pictures; expected more, as some are "
                "held out",
            )
            train_rows, test_rows = stratified_rows(labels, self.test_fraction, self.split_seed)
            train_rows, test_rows = _with_every_class(labels, train_rows, test_rows)
            train = images[train_rows], labels[train_rows]
            test = images[test_rows], labels[test_rows]
        for split, (_, labels) in (("train", train), ("test", test)):
            require(
                len(labels) > 0,
                f"{self.path} has no readable pictures left for {split} "
                f"(data.test_fraction={self.test_fraction:g}); expected some in each split",
            )
        warn_of_empty_classes("folder", set(train[1].tolist()), splits.class_names)
        return LabelledImages({"train": train, "test": test}, splits.class_names)


def _files_that_count(root: Path) -> list[tuple[str, Path]]:
    """Return name and path of the pictures, and of the file of their labels."""
    files = []
    for file in sorted(list_files(root, "*")):
        if file.suffix.lower() in PICTURES or file.name == LABEL_FILE:
            files.append((file.relative_to(root).as_posix(), file))
    return files


def _with_every_class(
    labels: np.ndarray, train_rows: list[int], test_rows: list[int]
) -> tuple[list[int], list[int]]:
    """Return the rows of both splits with a training picture of each class, even of only one."""
    for row in test_rows:
        if len(test_rows) > 1 and labels[row] not in labels[train_rows]:
            train_rows = sorted([*train_rows, row])
            test_rows = [other for other in test_rows if other != row]
    return train_rows, test_rows


def _split_folders(root: Path) -> tuple[Path, Path | None, tuple[str, ...]]:
    """Return the folder of the training pictures, that of the held-out ones, and further names.

    The second is None without one. The third are folders that are not read.
    """
    folders = {entry.name.lower(): entry for entry in sorted(root.iterdir()) if entry.is_dir()}
    train = [folders[name] for name in _TRAIN_FOLDERS if name in folders]
    test = [folders[name] for name in _TEST_FOLDERS if name in folders]
    if train and test:
        beside = [path.name for path in folders.values() if path not in (train[0], test[0])]
        return train[0], test[0], tuple(name for name in beside if not is_system_file(name))
    if train and len(folders) == 1:
        return train[0], None, ()
    return root, None, ()  # a class may be called train


def _open_pictures(folder: Path) -> FolderSource:
    """Return the pictures below a folder; archives and tables are for `prepare.py`."""
    source = open_source(folder)
    if not isinstance(source, FolderSource):
        raise DataError(
            f"{folder} holds archives or tables; data=folder reads pictures "
            f"({' '.join(PICTURES)}): unpack them, or make latents with experiments/prepare.py"
        )
    return source


def _class_names(source: FolderSource) -> tuple[str, ...]:
    """Return the names of the classes; those of EDM's dataset.json are numbers."""
    if source.classes or not source.labelled:
        return source.classes
    highest = max(label or 0 for label in source.labels)
    return tuple(map(str, range(highest + 1)))


def _read_pictures(
    options: FolderOptions, source: FolderSource, class_names: tuple[str, ...]
) -> Split:
    """Decode the pictures of one split; unreadable ones are skipped with a warning."""
    # A held-out class is the training class of the same name.
    numbers_by_name = {name: number for number, name in enumerate(class_names)}
    numbers = [numbers_by_name[name] for name in _class_names(source)]
    pixels = np.empty((source.count, *options.sample_shape), np.uint8)
    labels = np.zeros(source.count, np.int64)
    count = 0
    skipped = []
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        raws = source.read(0, source.count)
        for image in crop_ahead(pool, raws, options.size, _READ_AHEAD):
            if image.pixels is None:
                skipped.append(f"{image.raw.name} ({image.reason})")
                continue
            pixels[count] = _channels(image.pixels, options.channels)
            label = image.raw.label
            if label is not None:
                labels[count] = numbers[label]
            count += 1
    if skipped:
        warnings.warn(
            f"data=folder: skipped {len(skipped)} of {source.count} pictures of {options.path} "
            f"that cannot be read, such as {skipped[0]}",
            stacklevel=2,
        )
    return pixels[:count], labels[:count]


def _channels(pixels: np.ndarray, channels: int) -> np.ndarray:
    """Return RGB (size, size, 3) as (3, size, size), or as its luminance (1, size, size)."""
    if channels == 1:
        return np.asarray(Image.fromarray(pixels).convert("L"))[None]
    return pixels.transpose(2, 0, 1)
