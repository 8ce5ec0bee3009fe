"""Where pictures come from: a folder, WebDataset tars, or parquet and arrow tables.

Every source counts its pictures first and then gives any range of them as raw bytes, so that a
shard
is a function of its number and an interrupted preparation continues with the next one.
"""

from __future__ import annotations

import abc
import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.data.data_options import DataError
from experiments.data.tars import Member, group, list_tar
from routing.plain import json_of, whole

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")


@dataclass(frozen=True)
class Raw:
    """One picture as it lies in its source.

    Args:
        name: For messages.
        content: Its bytes, still encoded; None where there are none.
        label: Its class, or None.
        captions: What it shows, in words.
    """

    name: str
    content: bytes | None
    label: int | None
    captions: tuple[str, ...] = ()


class Source(abc.ABC):
    """A numbered set of pictures.

    Attributes:
        count: How many.
        classes: Their names where the source has them.
        labelled: Whether every picture has a label.
        captioned: Whether every picture has a caption.
        fingerprint: Changes with the list of pictures.
    """

    count: int
    classes: tuple[str, ...] = ()
    labelled = False
    captioned = False
    fingerprint: str

    @abc.abstractmethod
    def read(self, start: int, stop: int) -> Iterator[Raw]:
        """Give pictures `start..stop-1`."""


def open_source(
    path: Path,
    *,
    captions: Path | None = None,
    files: str = "*",
    columns: dict[str, str] | None = None,
) -> Source:
    """Return the pictures at `path`.

    Args:
        path: A folder of pictures, of tars or of tables, or one such file.
        captions: COCO annotations (.json) or lines of {"file_name", "caption"} (.jsonl), for a
            folder.
        files: Only files whose name matches, where a folder holds several splits.
        columns: Names of the `image`, `label` and `caption` columns of tables.

    Raises:
        DataError: Nothing there that is read here.
    """
    if not path.exists():
        raise DataError(f"{path} does not exist; expected a folder of pictures, tars or tables")
    try:
        found = [path] if path.is_file() else sorted(p for p in path.rglob(files) if p.is_file())
    except (NotImplementedError, ValueError):
        raise DataError(
            f"--files {files}: expected a pattern of names below {path}, such as 'train-*.tar'"
        ) from None
    for suffixes, kind in (((".tar",), "tar"), ((".parquet", ".arrow"), "table")):
        chosen = [p for p in found if p.suffix in suffixes]
        if chosen:
            if captions is not None:
                raise DataError(
                    "--captions is for folders; tars and tables bring their own captions"
                )
            if kind == "table":
                from experiments.data.parquet_tables import TableSource

                return TableSource(chosen, columns or {})
            return TarSource(chosen)
    pictures = [p for p in found if p.suffix.lower() in SUFFIXES and path.is_dir()]
    if not pictures:
        listed = ", ".join(p.name for p in found[:5]) or "nothing"
        raise DataError(
            f"{path} holds no pictures: expected {' '.join(SUFFIXES)} files, .tar, .parquet or "
            f".arrow; found {listed}"
        )
    return FolderSource(path, pictures, captions)


def digest(values: Any) -> str:
    """Return a short checksum of plain values."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


class FolderSource(Source):
    """Pictures in one folder per class, or all in one folder without classes.

    Args:
        root: The folder.
        pictures: Its files, sorted.
        captions: A file of captions, or None.

    Raises:
        DataError: Pictures beside class folders, or a picture without its caption.
    """

    def __init__(self, root: Path, pictures: list[Path], captions: Path | None) -> None:
        self.root, self._pictures = root, pictures
        self.count = len(pictures)
        names = [p.relative_to(root).as_posix() for p in pictures]
        tops = [name.split("/")[0] if "/" in name else None for name in names]
        self._captions = _read_captions(captions) if captions is not None else None
        if self._captions is None and any(tops):
            if None in tops:
                loose = names[tops.index(None)]
                raise DataError(
                    f"{root / loose} lies beside class folders; move it into one, or away"
                )
            self.labelled = True
            self.classes = tuple(sorted({top for top in tops if top is not None}))
            self._labels: list[int | None] = [self.classes.index(str(top)) for top in tops]
        else:
            self._labels = [None] * self.count
        if self._captions is not None:
            self.captioned = True
            missing = [name for name, p in zip(names, pictures, strict=True) if not self._of(p)]
            if missing:
                raise DataError(f"{captions} has no caption for {missing[0]} ({len(missing)} such)")
        self._names = names
        self.fingerprint = digest([names, [list(self._of(p)) for p in pictures]])

    def _of(self, picture: Path) -> tuple[str, ...]:
        if self._captions is None:
            return ()
        relative = picture.relative_to(self.root).as_posix()
        return self._captions.get(relative) or self._captions.get(picture.name) or ()

    def read(self, start: int, stop: int) -> Iterator[Raw]:
        """Give pictures `start..stop-1`."""
        for i in range(start, min(stop, self.count)):
            try:
                content = self._pictures[i].read_bytes()
            except OSError:
                content = None
            yield Raw(self._names[i], content, self._labels[i], self._of(self._pictures[i]))


def _read_captions(path: Path) -> dict[str, tuple[str, ...]]:
    captions: dict[str, list[str]] = {}
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            for line in filter(None, text.splitlines()):
                row = json_of(line)
                said = row.get("captions", row.get("caption", row.get("text")))
                captions[row["file_name"]] = [said] if isinstance(said, str) else list(said)
        else:
            content = json_of(text)
            names = {image["id"]: image["file_name"] for image in content["images"]}
            for note in sorted(content["annotations"], key=lambda note: note["id"]):
                captions.setdefault(names[note["image_id"]], []).append(note["caption"].strip())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(
            f"{path} holds no captions: expected COCO's annotations (images, annotations) as "
            ".json, "
            'or lines of {"file_name": ..., "caption": ...} as .jsonl'
        ) from None
    return {name: tuple(said) for name, said in captions.items()}


class TarSource(Source):
    """WebDataset tars: a picture, and where there is one a `cls` and a `txt` or a `json` caption.

    Args:
        tars: The archives, sorted.

    Raises:
        DataError: A damaged archive, no pictures, or labels for some samples alone.
    """

    def __init__(self, tars: list[Path]) -> None:
        self._tars = tars
        self._samples: list[tuple[int, str, Member, dict[str, Member]]] = []
        for number, path in enumerate(tars):
            for key, fields in group(list_tar(path)).items():
                field = next((f for f in fields if f".{f.split('.')[-1]}" in SUFFIXES), None)
                if field is not None:
                    self._samples.append((number, key, fields[field], fields))
        self.count = len(self._samples)
        if not self.count:
            raise DataError(f"{tars[0]} holds no pictures (.jpg, .png, ...)")
        with_label = sum("cls" in fields for *_, fields in self._samples)
        if 0 < with_label < self.count:
            bare = next(key for _, key, _, fields in self._samples if "cls" not in fields)
            raise DataError(f"{bare} has no cls, and {with_label} other samples have one")
        self.labelled = with_label == self.count
        self.captioned = all("txt" in f or "json" in f for *_, f in self._samples)
        self.fingerprint = digest([[path.name, path.stat().st_size] for path in tars])

    def read(self, start: int, stop: int) -> Iterator[Raw]:
        """Give pictures `start..stop-1`."""
        chosen = self._samples[start:stop]
        for number, samples in itertools.groupby(chosen, key=lambda sample: sample[0]):
            with self._tars[number].open("rb") as handle:
                for _, key, member, fields in samples:
                    parts = {}
                    for name, part in ({"image": member} | fields).items():
                        if name in ("image", "cls", "txt", "json"):
                            handle.seek(part.offset)
                            parts[name] = handle.read(part.size)
                    where = f"{self._tars[number].name}: {key}"
                    label = _number(parts["cls"], where) if "cls" in parts else None
                    yield Raw(where, parts["image"], label, _said(parts))


def _number(text: bytes, where: str) -> int:
    try:
        return whole(text.decode("ascii"))
    except ValueError:
        raise DataError(f"{where}: cls holds {text[:16]!r}; expected a number in digits") from None


def _said(parts: dict[str, bytes]) -> tuple[str, ...]:
    if "txt" in parts:
        return (parts["txt"].decode("utf-8", "replace").strip(),)
    try:
        row = json_of(parts.get("json", b"{}"))
        said = row.get("captions", row.get("caption", row.get("text"))) or ()
        return (said,) if isinstance(said, str) else tuple(map(str, said))
    except (ValueError, AttributeError, TypeError):
        return ()


class First(Source):
    """The first pictures of another source.

    Args:
        source: The whole.
        count: How many of it.
    """

    def __init__(self, source: Source, count: int) -> None:
        self._source = source
        self.count = min(count, source.count)
        self.classes, self.labelled = source.classes, source.labelled
        self.captioned = source.captioned
        self.fingerprint = digest([source.fingerprint, self.count])

    def read(self, start: int, stop: int) -> Iterator[Raw]:
        """Give pictures `start..stop-1`."""
        return self._source.read(start, min(stop, self.count))
