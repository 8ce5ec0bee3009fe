"""Classes of a folder of images: one subfolder per class, or the labels of EDM's dataset.json."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from backbones.parsing import bytes_of, json_of
from experiments.data.data_options import DataError, require

LABEL_FILE = "dataset.json"
_SPLIT = re.compile(r"(train|training|val|valid|validation|test|testing|dev)([-_]?[0-9]{4})?", re.I)
_SPLIT_OF_WORD = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_EDM_NAME = re.compile(r"[0-9]{5}/img[0-9]{8}\.[A-Za-z]+")


def class_of_each(root: Path, names: Sequence[str]) -> tuple[tuple[str, ...], list[int | None]]:
    """Return class names and the class of each image.

    A class is a folder below `root` with images at any depth. Classes are in alphabetical order, or
    in numerical order if all folder names are numbers.

    Args:
        root: The folder of the class folders.
        names: Paths of the images relative to `root`, with `/`.

    Raises:
        DataError: Images beside the class folders, or folders that are splits and not classes.
    """
    folders = []
    for name in names:
        require(
            "/" in name,
            f"{root / name} is beside the class folders; move it into one of them, or elsewhere",
        )
        folders.append(name.split("/")[0])
    _refuse_splits(root, names)
    require(
        not all(_EDM_NAME.fullmatch(name) for name in names),
        f"{root} has EDM's layout (00000/img00000000.png), where folders are not classes, but "
        f"no {LABEL_FILE} with the labels; copy that file to {root / LABEL_FILE}",
    )
    classes = _in_order(set(folders))
    numbers = {folder: number for number, folder in enumerate(classes)}
    return tuple(classes), [numbers[folder] for folder in folders]


def _in_order(folders: set[str]) -> list[str]:
    """Sort folder names; numbers sort by value, so that class 2 is folder 2 and not folder 10."""
    for name in folders:
        if not re.fullmatch("[0-9]{1,18}", name):
            return sorted(folders)
    return sorted(folders, key=lambda name: (int(name), name))


def _refuse_splits(root: Path, names: Sequence[str]) -> None:
    """Refuse the parent of train/ and val/, also below a chain of single folders."""
    paths = [name.split("/")[:-1] for name in names]
    parent = root
    for level in range(min(map(len, paths))):
        folders = sorted({path[level] for path in paths})
        splits = list(filter(_SPLIT.fullmatch, folders))
        training = [folder for folder in splits if folder.lower().startswith("train")]
        if splits == folders or (training and len(splits) > 1):
            example = parent / (training or splits)[0]
            raise DataError(
                f"{parent} holds the splits {', '.join(splits)}, which are not classes; use "
                f"each split by itself, such as {example}"
            )
        if len(folders) > 1:
            return
        parent /= folders[0]


def refuse_split_files(root: Path, files: Sequence[Path]) -> None:
    """Refuse tars, tables or shards of several splits, by their names and those of their folders.

    Such as `data/train-00000-of-00002.parquet` beside `data/validation-00000-of-00001.parquet`.
    """
    examples: dict[str, Path] = {}
    for file in files:
        words = re.split("[^a-z]+", file.relative_to(root).as_posix().lower())
        splits = {_SPLIT_OF_WORD[word] for word in words if word in _SPLIT_OF_WORD}
        if len(splits) == 1:
            examples.setdefault(splits.pop(), file)
    if len(examples) > 1:
        names = [examples[split].relative_to(root).as_posix() for split in sorted(examples)]
        first = examples.get("train") or next(iter(examples.values()))
        pattern = re.sub("[0-9]{3,}", "*", first.name)
        raise DataError(
            f"{root} holds several splits ({', '.join(names)}), which would be one data set; use "
            f"each by itself, such as --files '{pattern}' of prepare, or a folder of its own"
        )


def edm_labels(path: Path, names: Sequence[str]) -> list[int | None] | None:
    """Return the label of each image from EDM's dataset.json, None if `path` is no such file.

    It holds `{"labels": [["00000/img00000000.png", 6], ...]}`, or null for unlabelled images, whose
    labels are None.

    Raises:
        DataError: The file is damaged, or has no label for an image.
    """
    if not path.is_file():
        return None
    try:
        content = json_of(bytes_of(path), str(path))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(content, dict) or "labels" not in content:
        return None  # written by another program
    entries = content["labels"]
    if entries is None:
        return [None] * len(names)
    labels_by_name: dict[str, int] = {}
    for entry in entries if isinstance(entries, list) else [entries]:
        is_pair = isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str)
        require(
            is_pair and type(entry[1]) is int and 0 <= entry[1] < 2**31,
            f"{path}: labels holds {str(entry)[:60]}; expected pairs of a file name and a "
            'class number of at least 0, such as ["00000/img00000000.png", 6]',
        )
        labels_by_name[entry[0]] = entry[1]
    missing = [name for name in names if name not in labels_by_name]
    if missing:
        raise DataError(f"{path} has no label for {missing[0]} ({len(missing)} such images)")
    return [labels_by_name[name] for name in names]
