"""Open images to prepare, whichever kind of file holds them."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from experiments.data.class_folders import refuse_split_files
from experiments.data.data_options import PICTURES, DataError, require
from experiments.data.image_sources import FolderSource, ImageSource, TarSource
from experiments.data.table_source import TableSource
from experiments.runtime.files import is_system_file

_KINDS = {**dict.fromkeys(PICTURES, "images"), ".tar": "tars", ".parquet": "tables"}


def open_source(
    path: Path,
    *,
    captions: Path | None = None,
    files: str = "*",
    columns: Mapping[str, str | None] | None = None,
) -> ImageSource:
    """Return the images at `path`.

    Args:
        path: A folder of images, tars or tables, or one such file.
        captions: COCO annotations (.json), or lines of {"file_name", "caption"} (.jsonl).
        files: Pattern of the file names to include, for a folder that holds several splits.
        columns: Names of the `image`, `label` and `caption` columns of tables.
    """
    require(path.exists(), f"{path} does not exist; expected a folder of images, tars or tables")
    all_files = [path] if path.is_file() else sorted(list_files(path, files))
    by_kind: dict[str, list[Path]] = {}
    ignored_files: list[Path] = []
    for file in all_files:
        if file.suffix.lower() in _KINDS:
            by_kind.setdefault(_KINDS[file.suffix.lower()], []).append(file)
        else:
            ignored_files.append(file)
    if len(by_kind) != 1:
        raise DataError(_mixed_kinds_message(path, files, all_files, by_kind))
    [(kind, source_files)] = by_kind.items()
    if kind != "images" and path.is_dir():
        refuse_split_files(path, source_files)
    require(
        captions is None or kind == "images",
        "--captions applies to image folders; tars and tables contain their captions",
    )
    for role, name in (columns or {}).items():
        require(
            name is None or kind == "tables",
            f"--{role}-column is for tables, and {path} holds none; leave it out",
        )
    source: ImageSource
    if kind == "tars":
        source = TarSource(source_files)
    elif kind == "tables":
        source = TableSource(source_files, columns or {})
    else:
        source = FolderSource(path if path.is_dir() else path.parent, source_files, captions)
    for file in ignored_files:
        if file not in (source.label_file, captions):
            source.left_out.add(
                f"{file.suffix or 'other'} files", file.relative_to(path).as_posix()
            )
    return source


def _mixed_kinds_message(
    path: Path, pattern: str, files: list[Path], by_kind: dict[str, list[Path]]
) -> str:
    """Return the message for a folder with no kind of images, or several."""
    kinds = " and ".join(f"{kind} such as {files[0].name}" for kind, files in by_kind.items())
    names = ", ".join(file.name for file in files[:5])
    message = (
        f"{path} holds {kinds or 'no images'}: expected one kind of {' '.join(_KINDS)} files; "
        f"found {names or 'nothing'}"
    )
    if by_kind:
        suffix = max(by_kind.values(), key=len)[0].suffix
        message += f"; experiments/prepare.py chooses one kind by --files '*{suffix}'"
    elif pattern != "*":
        message += f" that matches --files '{pattern}'"
    return message


def list_files(top: Path, pattern: str) -> Iterator[Path]:
    """Yield the files at any depth whose names match, also behind links to folders.

    Files of the system or an editor, such as `._1.png` or `.ipynb_checkpoints`, are ignored.
    """
    for folder_name, subfolders, names in os.walk(top, followlinks=True):
        folder = Path(folder_name)
        # A link to a parent folder would be followed without end.
        parents = set(map(Path.resolve, (folder, *folder.absolute().parents)))
        subfolders[:] = [
            name
            for name in subfolders
            if not is_system_file(name) and (folder / name).resolve() not in parents
        ]
        for name in fnmatch.filter(names, pattern):
            # Broken links and pipes are included: what reads them refuses or skips them by name.
            if not is_system_file(name):
                yield folder / name
