"""Pictures to prepare: from a folder, WebDataset tars or tables, cropped as ADM prepared ImageNet.

Every source counts its pictures first and then gives any range of them as raw bytes, so that a
shard is a function of its number and an interrupted preparation continues with the next one.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import io
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from experiments.data.class_folders import LABEL_FILE, class_of_each, edm_labels
from experiments.data.data_options import PICTURES, DataError, first_line, require
from experiments.data.tars import Member, samples_of
from experiments.runtime.files import is_system_file
from experiments.runtime.parsing import json_of, whole

_KINDS = dict.fromkeys(PICTURES, "pictures") | {".tar": "tars"}
_KINDS |= {".parquet": "tables"}
# Names of columns on the Hugging Face hub, the likeliest first.
_GUESSES = {
    "image": ("image", "img", "jpg", "png", "webp"),
    "label": ("label", "labels", "cls", "fine_label", "class"),
    "caption": ("caption", "text", "txt"),
}


@dataclass(frozen=True)
class RawPicture:
    """One picture as it lies in its source."""

    name: str  # for messages
    content: bytes | None  # its bytes, still encoded; None where there are none
    label: int | None  # its class, or None
    captions: tuple[str, ...] = ()  # what it shows, in words
    lacking: str = "no bytes"  # why there are none

    def __post_init__(self) -> None:
        if self.label is not None and not 0 <= self.label < 2**31:
            raise DataError(f"{self.name} has class {self.label}; expected 0 or more")


class PictureSource:
    """A numbered set of pictures."""

    count: int  # how many
    classes: tuple[str, ...] = ()  # their names where the source has them
    labelled = False  # whether every picture has a label
    captioned = False  # whether every picture has a caption
    fingerprint: str  # changes with the list of pictures
    others: Sequence[str] = ()  # files beside the pictures that are passed over

    def read(self, start: int, stop: int) -> Iterator[RawPicture]:
        """Give pictures `start..stop-1`, `stop` at most `count`."""
        raise NotImplementedError

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

    `captions` are COCO annotations (.json) or lines of {"file_name", "caption"} (.jsonl), `columns`
    the names of the `image`, `label` and `caption` columns of tables; of a folder with several
    splits only `files` whose name matches are taken.
    """
    require(path.exists(), f"{path} does not exist; expected a folder of pictures, tars or tables")
    found = [path] if path.is_file() else sorted(_files(path, files))
    kinds: dict[str, list[Path]] = {}
    for file in found:
        kinds.setdefault(_KINDS.get(file.suffix.lower(), "others"), []).append(file)
    others = kinds.pop("others", [])
    if len(kinds) != 1:
        listed = (f"{kind} such as {some[0].name}" for kind, some in kinds.items())
        seen = ", ".join(file.name for file in found[:5]) or "nothing"
        tip = max(kinds.values(), key=len)[0].suffix if kinds else ".tar"
        raise DataError(
            f"{path} holds {' and '.join(listed) or 'no pictures'}: expected one kind of "
            f"{' '.join(_KINDS)} files; found {seen}; name those to take, as --files '*{tip}'"
        )
    [(kind, those)] = kinds.items()
    bring = "--captions is for folders; tars and tables bring their own captions"
    require(captions is None or kind == "pictures", bring)
    for role, name in (columns or {}).items():
        out = f"--{role}-column is for tables, and {path} holds none; leave it out"
        require(name is None or kind == "tables", out)
    if kind != "pictures":
        return TarSource(those) if kind == "tars" else TableSource(those, columns or {})
    source = FolderSource(path if path.is_dir() else path.parent, those, captions)
    source.others = [p.name for p in others if p != source.label_file]
    return source


def _files(top: Path, pattern: str) -> Iterator[Path]:
    """Give the files at any depth whose names match; folders that are links count as well.

    What the system or an editor left there, such as `._1.png` or `.ipynb_checkpoints`, is ignored.
    """
    for at, below, names in os.walk(top, followlinks=True):
        here = Path(at)
        # A link to a folder on the way to it has no end.
        way = {folder.resolve() for folder in (here, *here.absolute().parents)}
        below[:] = [
            name
            for name in below
            if not is_system_file(name) and (here / name).resolve() not in way
        ]
        own = [name for name in names if not is_system_file(name)]
        for path in (here / name for name in fnmatch.filter(own, pattern)):
            # Of links to nothing, pictures are listed as skipped.
            if path.is_file() or (path.suffix.lower() in PICTURES and not path.exists()):
                yield path


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


class FolderSource(PictureSource):
    """Pictures in one folder per class, in EDM's layout, or all in one folder without classes."""

    def __init__(self, root: Path, pictures: list[Path], captions: Path | None) -> None:
        self._pictures = pictures
        self.count = len(pictures)
        self._names = names = [p.relative_to(root).as_posix() for p in pictures]
        self._labels: list[int | None] = [None] * self.count
        self._captions: list[tuple[str, ...]] = [()] * self.count
        self._unreadable: dict[int, str] = {}
        self.label_file: Path | None = None
        if captions is not None:
            self.captioned, known = True, _read_captions(captions)
            self._captions = [
                known.get(name) or known.get(name.rsplit("/", 1)[-1]) or () for name in names
            ]
            missing = [name for name, own in zip(names, self._captions, strict=True) if not own]
            if missing:
                raise DataError(f"{captions} has no caption for {missing[0]} ({len(missing)} such)")
        else:
            is_edm, labels = edm_labels(root / LABEL_FILE, names)
            if is_edm:
                self.label_file = root / LABEL_FILE
            if labels is not None:
                self.labelled, self._labels = True, list(labels)
            elif not is_edm and any("/" in name for name in names):
                self.labelled = True
                self.classes, self._labels, self._unreadable = class_of_each(
                    root, names, self._unreadable_reason
                )
        listed: list[Any] = [names, self._captions]
        # Named only where they differ from the folders in alphabetical order, so that preparations
        # of other folders that were begun by an older version can be continued.
        folders = tuple(sorted({name.split("/")[0] for name in names}))
        if self.label_file is not None or (self.classes and self.classes != folders):
            listed.append([self.classes, self._labels])
        self.fingerprint = _digest(listed)

    def _unreadable_reason(self, index: int) -> str:
        raw = next(self.read(index, index + 1))
        return crop(raw, 8).reason

    def read(self, start: int, stop: int) -> Iterator[RawPicture]:
        """Give pictures `start..stop-1`."""
        for i in range(start, stop):
            content, why = None, self._unreadable.get(i, "")
            try:
                # Those in a folder without a class have no label and stay unread.
                content = None if why else self._pictures[i].read_bytes()
            except OSError as error:
                why = str(error.strerror)
            yield RawPicture(self._names[i], content, self._labels[i], self._captions[i], why)


def _read_captions(path: Path) -> dict[str, tuple[str, ...]]:
    captions: dict[str, list[str]] = {}
    try:
        text = path.read_text(encoding="utf-8-sig")  # Windows marks its files
        if path.suffix == ".jsonl":
            # Not `splitlines`: a caption may hold other ends of lines, such as U+2028.
            for line in filter(str.strip, text.split("\n")):
                row = json_of(line)
                captions.setdefault(row["file_name"], []).append(row["caption"].strip())
        else:
            content = json_of(text)
            names = {image["id"]: image["file_name"] for image in content["images"]}
            for note in sorted(content["annotations"], key=lambda note: note["id"]):
                captions.setdefault(names[note["image_id"]], []).append(note["caption"].strip())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is laid out otherwise"
        raise DataError(
            f"{path} holds no captions ({why}): expected COCO's annotations (images, annotations) "
            'as .json, or lines of {"file_name": ..., "caption": ...} as .jsonl'
        ) from None
    return {name: tuple(found) for name, found in captions.items()}


class TarSource(PictureSource):
    """WebDataset tars: pictures, with a `cls` and a `txt` caption where there is one."""

    def __init__(self, tars: list[Path]) -> None:
        self._tars = tars
        self._samples: list[tuple[int, str, Member, dict[str, Member]]] = []
        for number, path in enumerate(tars):
            for key, fields in samples_of(path).items():
                found = [f for f in fields if f".{f.split('.')[-1]}" in PICTURES]
                if found:  # of `depth.png` and `jpg`, the second is the sample itself
                    field = min(found, key=lambda field: field.count("."))
                    self._samples.append((number, key, fields[field], fields))
        self.count = len(self._samples)
        require(self.count > 0, f"{tars[0]} holds no pictures (.jpg, .png, ...)")
        bare = [key for _, key, _, fields in self._samples if "cls" not in fields]
        self.labelled = not bare
        said = f"{bare[0] if bare else ''} has no cls, and other samples have one"
        require(len(bare) in (0, self.count), said)
        self.captioned = all("txt" in fields for *_, fields in self._samples)
        self.fingerprint = _digest([[path.name, path.stat().st_size] for path in tars])

    def read(self, start: int, stop: int) -> Iterator[RawPicture]:
        """Give pictures `start..stop-1`."""
        chosen = self._samples[start:stop]
        for number, samples in itertools.groupby(chosen, key=lambda sample: sample[0]):
            with self._tars[number].open("rb") as handle:
                for _, key, member, fields in samples:
                    parts = {}
                    for name, part in (fields | {"image": member}).items():
                        if name in ("image", "cls", "txt"):
                            handle.seek(part.offset)
                            parts[name] = handle.read(part.size)
                    where = f"{self._tars[number].name}: {key}"
                    said: tuple[str, ...] = ()
                    label = None
                    if "cls" in parts:
                        text = parts["cls"].decode("latin-1")
                        label = whole(text, f"{where}: cls holds ", DataError)
                    if "txt" in parts:
                        caption = parts["txt"].decode("utf-8", "replace").strip()
                        said = (caption,) if caption else ()
                    yield RawPicture(where, parts["image"], label, said)


class TableSource(PictureSource):
    """Parquet tables, as the Hugging Face hub holds data sets; a caption is a text."""

    def __init__(self, files: list[Path], columns: Mapping[str, str | None]) -> None:
        self._groups: list[tuple[Path, int, int]] = []  # file, row group, rows
        for path in files:
            with _opened(path) as file:
                rows = [file.metadata.row_group(k).num_rows for k in range(file.num_row_groups)]
                self._groups += [(path, group, count) for group, count in enumerate(rows)]
        with _opened(files[0]) as file:
            schema = file.schema_arrow
        self.count = sum(rows for *_, rows in self._groups)
        guessed = {
            role: next((name for name in likely if name in schema.names), None)
            for role, likely in _GUESSES.items()
        }
        named: dict[str, str | None] = {role: name for role, name in columns.items() if name}
        self._columns = guessed | named
        listed = ", ".join(schema.names) or "none"
        for name in filter(None, named.values()):
            require(name in schema.names, f"{files[0]} has no column {name!r}; it has {listed}")
        require(
            self._columns["image"] is not None and self.count > 0,
            f"{files[0]} has no pictures in columns {listed}; name the column with --image-column",
        )
        self.labelled = self._columns["label"] is not None
        self.captioned = self._columns["caption"] is not None
        self.classes = _class_names(schema, self._columns["label"])
        # Columns that were not guessed: other labels of the same files are other data.
        other = [[role, name] for role, name in named.items() if name != guessed[role]]
        self.fingerprint = _digest([*([p.name, p.stat().st_size] for p in files), *other])

    def read(self, start: int, stop: int) -> Iterator[RawPicture]:
        """Give pictures `start..stop-1`."""
        first = 0
        wanted = [name for name in self._columns.values() if name is not None]
        for path, group, count in self._groups:
            low, high = max(start - first, 0), min(stop - first, count)
            if low < high:
                with _opened(path) as file:
                    rows = file.read_row_group(group, wanted).slice(low, high - low).to_pylist()
                for number, row in enumerate(rows, first + low):
                    yield self._raw(row, f"{path.name}: row {number}")
            first += count

    def _raw(self, row: dict[str, Any], where: str) -> RawPicture:
        image, label, caption = (row.get(str(self._columns[role])) for role in _GUESSES)
        content = image.get("bytes") if isinstance(image, dict) else image
        if self.labelled and not isinstance(label, int):
            raise DataError(f"{where} has label {label!r}; expected a whole number")
        if self.captioned and not isinstance(caption, str):
            raise DataError(f"{where} has caption {caption!r}; expected text")
        captions = (caption,) if self.captioned and caption else ()
        return RawPicture(where, content if isinstance(content, bytes) else None, label, captions)


def _class_names(schema: Any, column: str | None) -> tuple[str, ...]:
    try:
        features = json_of(schema.metadata[b"huggingface"])["info"]["features"]
        return tuple(map(str, features[str(column)]["names"]))
    except (KeyError, TypeError, ValueError):
        return ()


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a parquet file."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise DataError('tables need pyarrow; pip install -e ".[data]"') from None
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is damaged or no table: {first_line(error)}") from None


# --- from bytes to cropped pixels -----------------------------------------------------------------


#: The longest picture that is cropped, in multiples of its shorter side.
_NARROW = 64


class CroppedPicture(NamedTuple):
    """A picture (size, size, 3) uint8, or None and the reason why it could not be read."""

    raw: RawPicture
    pixels: np.ndarray[Any, Any] | None
    reason: str = ""


def eight_bits(image: Image.Image) -> Image.Image:
    """Return a picture as upright 8-bit RGB: 16 bits scaled, what is transparent laid on white."""
    with contextlib.suppress(Exception):  # a damaged note of a whole picture
        ImageOps.exif_transpose(image, in_place=True)
    # Converting, Pillow cuts 16 bits off at 255; older ones open such PNGs as 32-bit integers.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        values = np.asarray(image).astype(np.uint32)
        return Image.fromarray(((values + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        kind = "floating-point" if image.mode == "F" else "32-bit"
        raise ValueError(f"{kind} values, which have no white; save it with 8 or 16 bits")
    if "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, "white")
        white.paste(image, mask=image.getchannel("A"))
        return white
    return image if image.mode == "RGB" else image.convert("RGB")


def center_crop(image: Image.Image, size: int) -> np.ndarray[Any, Any]:
    """Return the middle of a picture, (size, size, 3) uint8, as ADM prepared ImageNet.

    Halve with a box filter while the shorter side stays at least twice the target, bring the
    shorter side to `size` with a bicubic filter, cut the middle (Dhariwal and Nichol, 2021).
    """
    if max(image.size) > _NARROW * min(image.size):
        # Its shorter side brought to `size`, the longer one would fill the memory.
        raise ValueError(f"{image.width}x{image.height} pixels are too long and narrow to crop")
    image = eight_bits(image)
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = size / min(image.size)
    target = (round(image.width * scale), round(image.height * scale))
    pixels = np.asarray(image.resize(target, Image.Resampling.BICUBIC))
    top, left = (pixels.shape[0] - size) // 2, (pixels.shape[1] - size) // 2
    return pixels[top : top + size, left : left + size]


def crop(raw: RawPicture, size: int) -> CroppedPicture:
    """Decode and crop one picture; a damaged one becomes a reason, not an error."""
    if raw.content is None:
        return CroppedPicture(raw, None, raw.lacking)
    try:
        with Image.open(io.BytesIO(raw.content)) as image:
            return CroppedPicture(raw, center_crop(image, size))
    except UnidentifiedImageError:
        return CroppedPicture(raw, None, "no picture that Pillow knows")
    except Exception as error:
        return CroppedPicture(raw, None, first_line(error))


def crop_ahead(
    pool: ThreadPoolExecutor, pictures: Iterator[RawPicture], size: int, depth: int = 64
) -> Iterator[CroppedPicture]:
    """Crop in order with at most `depth` results waiting: `Executor.map` would read everything."""
    waiting = [pool.submit(crop, raw, size) for raw in itertools.islice(pictures, depth)]
    while waiting:
        yield waiting.pop(0).result()
        waiting += [pool.submit(crop, raw, size) for raw in itertools.islice(pictures, 1)]
