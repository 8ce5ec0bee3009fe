"""Where pictures come from: a folder, WebDataset tars, or parquet and arrow tables.

Every source counts its pictures first and then gives any range of them as raw bytes, so that a
shard is a function of its number and an interrupted preparation continues with the next one.
"""

from __future__ import annotations

import abc
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.data.data_options import DataError
from experiments.data.tars import Member, group, list_tar, read_label
from routing.parsing import json_of

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")
# Names of columns on the Hugging Face hub, the likeliest first.
_GUESSES = {
    "image": ("image", "img", "jpg", "png", "webp"),
    "label": ("label", "labels", "cls", "fine_label", "class"),
    "caption": ("caption", "captions", "text", "txt", "sentences", "sentences_raw"),
}


@dataclass(frozen=True)
class RawPicture:
    """One picture as it lies in its source."""

    name: str  # for messages
    content: bytes | None  # its bytes, still encoded; None where there are none
    label: int | None  # its class, or None
    captions: tuple[str, ...] = ()  # what it shows, in words

    def __post_init__(self) -> None:
        if self.label is not None and not 0 <= self.label < 2**31:
            raise DataError(f"{self.name} has class {self.label}; expected 0 or more")


class PictureSource(abc.ABC):
    """A numbered set of pictures."""

    count: int  # how many
    classes: tuple[str, ...] = ()  # their names where the source has them
    labelled = False  # whether every picture has a label
    captioned = False  # whether every picture has a caption
    fingerprint: str  # changes with the list of pictures

    @abc.abstractmethod
    def read(self, start: int, stop: int) -> Iterator[RawPicture]:
        """Give pictures `start..stop-1`, `stop` at most `count`."""

    def limit(self, count: int) -> None:
        """Leave out all but the first `count` pictures."""
        self.count = min(count, self.count)
        self.fingerprint = _digest([self.fingerprint, self.count])


def open_source(
    path: Path,
    *,
    captions: Path | None = None,
    files: str = "*",
    columns: Mapping[str, str | None] | None = None,
) -> PictureSource:
    """Return the pictures at `path`: a folder of pictures, of tars or of tables, or one such file.

    Args:
        path: See above.
        captions: COCO annotations (.json) or lines of {"file_name", "caption"} (.jsonl).
        files: Only files whose name matches, where a folder holds several splits.
        columns: Names of the `image`, `label` and `caption` columns of tables.
    """
    if not path.exists():
        raise DataError(f"{path} does not exist; expected a folder of pictures, tars or tables")
    try:
        found = [path] if path.is_file() else sorted(p for p in path.rglob(files) if p.is_file())
    except (NotImplementedError, ValueError):
        raise DataError(
            f"--files {files}: expected a pattern of names below {path}, such as 'train-*.tar'"
        ) from None
    tars = [p for p in found if p.suffix == ".tar"]
    tables = [p for p in found if p.suffix in (".parquet", ".arrow")]
    if captions is not None and (tars or tables):
        raise DataError("--captions is for folders; tars and tables bring their own captions")
    if tars or tables:
        return TarSource(tars) if tars else TableSource(tables, columns or {})
    pictures = [p for p in found if p.suffix.lower() in SUFFIXES and path.is_dir()]
    if not pictures:
        listed = ", ".join(p.name for p in found[:5]) or "nothing"
        raise DataError(
            f"{path} holds no pictures: expected {' '.join(SUFFIXES)} files, .tar, .parquet or "
            f".arrow; found {listed}"
        )
    return FolderSource(path, pictures, captions)


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def _listed(said: Any) -> tuple[str, ...]:
    return (said,) if isinstance(said, str) else tuple(map(str, said or ()))


def _captions_of(row: dict[str, Any]) -> tuple[str, ...]:
    return _listed(row.get("captions", row.get("caption", row.get("text"))))


class FolderSource(PictureSource):
    """Pictures in one folder per class, or all in one folder without classes."""

    def __init__(self, root: Path, pictures: list[Path], captions: Path | None) -> None:
        self.root, self._pictures = root, pictures
        self.count = len(pictures)
        names = [p.relative_to(root).as_posix() for p in pictures]
        tops = [name.split("/")[0] if "/" in name else None for name in names]
        self._labels: list[int | None] = [None] * self.count
        self._captions = _read_captions(captions) if captions is not None else None
        if self._captions is None and any(tops):
            if None in tops:
                loose = names[tops.index(None)]
                raise DataError(
                    f"{root / loose} lies beside class folders; move it into one, or away"
                )
            self.labelled = True
            self.classes = tuple(sorted({top for top in tops if top is not None}))
            numbers = {name: number for number, name in enumerate(self.classes)}
            self._labels = [numbers[str(top)] for top in tops]
        if self._captions is not None:
            self.captioned = True
            missing = [name for name, p in zip(names, pictures, strict=True) if not self._of(p)]
            if missing:
                raise DataError(f"{captions} has no caption for {missing[0]} ({len(missing)} such)")
        self._names = names
        self.fingerprint = _digest([names, [list(self._of(p)) for p in pictures]])

    def _of(self, picture: Path) -> tuple[str, ...]:
        if self._captions is None:
            return ()
        relative = picture.relative_to(self.root).as_posix()
        return self._captions.get(relative) or self._captions.get(picture.name) or ()

    def read(self, start: int, stop: int) -> Iterator[RawPicture]:
        """Give pictures `start..stop-1`."""
        for i in range(start, stop):
            try:
                content = self._pictures[i].read_bytes()
            except OSError:
                content = None
            yield RawPicture(self._names[i], content, self._labels[i], self._of(self._pictures[i]))


def _read_captions(path: Path) -> dict[str, tuple[str, ...]]:
    captions: dict[str, list[str]] = {}
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            for line in filter(None, text.splitlines()):
                row = json_of(line)
                captions[row["file_name"]] = list(_captions_of(row))
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
            '.json, or lines of {"file_name": ..., "caption": ...} as .jsonl'
        ) from None
    return {name: tuple(found) for name, found in captions.items()}


class TarSource(PictureSource):
    """WebDataset tars: pictures, with a `cls` and a `txt` or `json` caption where there is one."""

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
        self.fingerprint = _digest([[path.name, path.stat().st_size] for path in tars])

    def read(self, start: int, stop: int) -> Iterator[RawPicture]:
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
                    label = read_label(parts["cls"], where) if "cls" in parts else None
                    yield RawPicture(where, parts["image"], label, _tar_captions(parts))


def _tar_captions(parts: dict[str, bytes]) -> tuple[str, ...]:
    if "txt" in parts:
        return (parts["txt"].decode("utf-8", "replace").strip(),)
    try:
        return _captions_of(json_of(parts.get("json", b"{}")))
    except (ValueError, AttributeError, TypeError):
        return ()


class TableSource(PictureSource):
    """Tables of parquet or arrow, as the Hugging Face hub holds data sets."""

    def __init__(self, files: list[Path], columns: Mapping[str, str | None]) -> None:
        try:
            import pyarrow  # noqa: F401
        except ImportError:
            raise DataError('tables need pyarrow; pip install -e ".[data]"') from None
        self._blocks: list[tuple[Path, int, int]] = []
        schema = None
        for path in files:
            found, counts = _open_table(path)
            schema = schema or found
            self._blocks += [(path, block, rows) for block, rows in enumerate(counts)]
        assert schema is not None
        self.count = sum(rows for *_, rows in self._blocks)
        self._columns = {
            role: _column(schema, role, columns.get(role), str(files[0])) for role in _GUESSES
        }
        if self._columns["image"] is None or not self.count:
            raise DataError(
                f"{files[0]} has no pictures in columns {', '.join(schema.names) or 'none'}; "
                "name the column with --image-column"
            )
        self.labelled = self._columns["label"] is not None
        self.captioned = self._columns["caption"] is not None
        self.classes = _class_names(schema, self._columns["label"])
        self.fingerprint = _digest([[p.name, p.stat().st_size] for p in files])

    def read(self, start: int, stop: int) -> Iterator[RawPicture]:
        """Give pictures `start..stop-1`."""
        at = 0
        wanted = [name for name in self._columns.values() if name is not None]
        for path, block, rows in self._blocks:
            low, high = max(start - at, 0), min(stop - at, rows)
            if low < high:
                table = _read_block(path, block, wanted).slice(low, high - low)
                for i, row in enumerate(table.to_pylist(), low):
                    yield self._raw(row, f"{path.name}: row {at + i}")
            at += rows

    def _raw(self, row: dict[str, Any], where: str) -> RawPicture:
        image = row[str(self._columns["image"])]
        content = image.get("bytes") if isinstance(image, dict) else image
        label = row[str(self._columns["label"])] if self.labelled else None
        if self.labelled and not isinstance(label, int):
            raise DataError(f"{where} has label {label!r}; expected a whole number")
        captions = _listed(row[str(self._columns["caption"])]) if self.captioned else ()
        return RawPicture(where, content if isinstance(content, bytes) else None, label, captions)


def _column(schema: Any, role: str, given: str | None, where: str) -> str | None:
    if given is not None and given not in schema.names:
        raise DataError(f"{where} has no column {given!r}; it has {', '.join(schema.names)}")
    return given or next((name for name in _GUESSES[role] if name in schema.names), None)


def _class_names(schema: Any, column: str | None) -> tuple[str, ...]:
    try:
        features = json_of(schema.metadata[b"huggingface"])["info"]["features"]
        return tuple(map(str, features[str(column)]["names"]))
    except (KeyError, TypeError, ValueError):
        return ()


def _open_table(path: Path) -> tuple[Any, list[int]]:
    """Return a table's schema and the rows of each block that is read at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if path.suffix == ".parquet":
            with pq.ParquetFile(path) as file:
                groups = range(file.num_row_groups)
                return file.schema_arrow, [file.metadata.row_group(k).num_rows for k in groups]
        table = _map_arrow(path)
        return table.schema, [table.num_rows]
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is damaged or no table: {str(error).splitlines()[0]}") from None


def _read_block(path: Path, block: int, columns: list[str]) -> Any:
    import pyarrow.parquet as pq

    if path.suffix != ".parquet":
        return _map_arrow(path).select(columns)
    with pq.ParquetFile(path) as file:
        return file.read_row_group(block, columns=columns)


def _map_arrow(path: Path) -> Any:
    import pyarrow as pa

    # The hub's cache holds streams; other writers leave files with a footer.
    try:
        return pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
    except pa.ArrowInvalid:
        return pa.ipc.open_file(pa.memory_map(str(path))).read_all()
