"""Sources of images to prepare: folders and WebDataset tars.

Every source counts its images first and then returns any range of them as raw bytes, so that a
shard is a function of its number and an interrupted preparation continues with the next one.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from backbones.parsing import bytes_of, json_of
from experiments.data.class_folders import LABEL_FILE, class_of_each, edm_labels
from experiments.data.data_options import PICTURES, DataError, require
from experiments.data.raw_images import RawImage
from experiments.data.tars import Member, read_label, read_member, samples_of
from experiments.runtime.digest import PICTURE_BYTES, hash_of, picture_ends


class ImageSource:
    """A numbered set of images."""

    count: int
    classes: tuple[str, ...] = ()  # class names if the source has them
    labelled = False  # whether every image has a label
    captioned = False  # whether every image has a caption
    fingerprint: str  # changes with the list of images
    ignored_files: Sequence[str] = ()  # files beside the images that are not read

    def read(self, start: int, stop: int) -> Iterator[RawImage]:
        """Yield images `start..stop-1`, with `stop` at most `count`."""
        raise NotImplementedError

    def digest(self, start: int, stop: int) -> str:
        """Return a digest of what images `start..stop-1` hold; whole images are not read."""
        raise NotImplementedError

    def limit(self, count: int) -> None:
        """Drop all but the first `count` images."""
        self.count = min(count, self.count)
        self.fingerprint = digest_of([self.fingerprint, self.count])


def digest_of(values: Any) -> str:
    """Return a checksum of JSON values."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


class FolderSource(ImageSource):
    """Images in one folder per class, in EDM's layout, or all in one folder without classes."""

    def __init__(self, root: Path, images: list[Path], captions: Path | None) -> None:
        self._root = root
        self.count = len(images)
        self._names = [path.relative_to(root).as_posix() for path in images]
        self.labels: list[int | None] = [None] * self.count
        self._captions: list[tuple[str, ...]] = [()] * self.count
        self.label_file: Path | None = None
        if captions is not None:
            self._assign_captions(captions)
        else:
            self._assign_labels()
        content: list[Any] = [self._names, self._captions]
        # Included only where they differ from the folders in alphabetical order, so that
        # preparations begun by an older version can be continued.
        folders = tuple(sorted({name.split("/")[0] for name in self._names}))
        if self.label_file is not None or (self.classes and self.classes != folders):
            content.append([self.classes, self.labels])
        self.fingerprint = digest_of(content)

    def _assign_captions(self, path: Path) -> None:
        self.captioned = True
        captions_by_name = _read_captions(path)
        missing = []
        for index, name in enumerate(self._names):
            # By the path, or by the file name alone.
            captions = captions_by_name.get(name) or captions_by_name.get(name.rsplit("/", 1)[-1])
            if captions:
                self._captions[index] = captions
            else:
                missing.append(name)
        if missing:
            raise DataError(
                f"{path} has no caption for {missing[0]} (images without a caption: {len(missing)})"
            )

    def _assign_labels(self) -> None:
        path = self._root / LABEL_FILE
        labels = edm_labels(path, self._names)
        if labels is not None:
            self.label_file, self.labels = path, labels
        elif any("/" in name for name in self._names):
            self.classes, self.labels = class_of_each(self._root, self._names)
        self.labelled = self.labels[0] is not None

    def digest(self, start: int, stop: int) -> str:
        """Return a digest of the ends of images `start..stop-1`."""
        return hash_of(picture_ends(self._root / name) for name in self._names[start:stop])

    def read(self, start: int, stop: int) -> Iterator[RawImage]:
        """Yield images `start..stop-1`."""
        for index in range(start, stop):
            name, content, reason = self._names[index], None, ""
            try:
                content = bytes_of(self._root / name)
            except OSError as error:
                reason = str(error.strerror)
            yield RawImage(name, content, self.labels[index], self._captions[index], reason)


def _read_captions(path: Path) -> dict[str, tuple[str, ...]]:
    """Return the captions of each file name."""
    captions: dict[str, list[str]] = {}
    try:
        text = bytes_of(path).decode("utf-8-sig")  # Windows programs write a byte order mark
        if path.suffix == ".jsonl":
            # Not `splitlines`: a caption may contain other line ends, such as U+2028.
            for line in filter(str.strip, text.split("\n")):
                row = json_of(line)
                captions.setdefault(row["file_name"], []).append(row["caption"].strip())
        else:
            content = json_of(text)
            names = {image["id"]: image["file_name"] for image in content["images"]}
            for annotation in sorted(content["annotations"], key=lambda entry: entry["id"]):
                name = names[annotation["image_id"]]
                captions.setdefault(name, []).append(annotation["caption"].strip())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "unexpected layout"
        raise DataError(
            f"{path} holds no captions ({reason}): expected COCO's annotations (images, "
            'annotations) as .json, or lines of {"file_name": ..., "caption": ...} as .jsonl'
        ) from None
    return {name: tuple(texts) for name, texts in captions.items()}


# Number of the tar, key, the image, and all fields of the sample.
Sample: TypeAlias = tuple[int, str, Member, dict[str, Member]]


class TarSource(ImageSource):
    """WebDataset tars: images, with a label `cls` and a caption `txt` if there are any."""

    def __init__(self, tars: list[Path]) -> None:
        self._tars = tars
        self._samples: list[Sample] = []
        unlabelled = []
        self.captioned = True
        for number, path in enumerate(tars):
            for key, fields in samples_of(path).items():
                image_field = _image_field(fields)
                if image_field is None:
                    continue
                self._samples.append((number, key, fields[image_field], fields))
                self.captioned &= "txt" in fields
                if "cls" not in fields:
                    unlabelled.append(key)
        self.count = len(self._samples)
        require(self.count > 0, f"{tars[0]} holds no images (.jpg, .png, ...)")
        self.labelled = not unlabelled
        require(
            len(unlabelled) in (0, self.count),
            f"{''.join(unlabelled[:1])} has no cls, and other samples have one",
        )
        self.fingerprint = digest_of([[path.name, path.stat().st_size] for path in tars])

    def digest(self, start: int, stop: int) -> str:
        """Return a digest of the ends of images `start..stop-1`, of their labels and captions."""

        def parts() -> Iterator[bytes]:
            for number, group in self._by_tar(start, stop):
                with self._tars[number].open("rb") as archive:
                    for _, key, image, fields in group:
                        yield f"{key} {image.size}".encode(errors="replace")
                        yield read_member(archive, image, PICTURE_BYTES)
                        end = image.offset + max(0, image.size - PICTURE_BYTES)
                        yield read_member(archive, image._replace(offset=end), PICTURE_BYTES)
                        for field in sorted({"cls", "txt"} & fields.keys()):
                            yield read_member(archive, fields[field])

        return hash_of(parts())

    def _by_tar(self, start: int, stop: int) -> Iterator[tuple[int, Iterator[Sample]]]:
        """Yield the number of each tar and its samples among `start..stop-1`."""
        return itertools.groupby(self._samples[start:stop], key=lambda sample: sample[0])

    def read(self, start: int, stop: int) -> Iterator[RawImage]:
        """Yield images `start..stop-1`."""
        for number, group in self._by_tar(start, stop):
            with self._tars[number].open("rb") as archive:
                for _, key, image, fields in group:
                    name = f"{self._tars[number].name}: {key}"
                    label = read_label(archive, fields, name)
                    captions: tuple[str, ...] = ()
                    if "txt" in fields:
                        caption = read_member(archive, fields["txt"]).decode("utf-8", "replace")
                        captions = (caption.strip(),) if caption.strip() else ()
                    yield RawImage(name, read_member(archive, image), label, captions)


def _image_field(fields: dict[str, Member]) -> str | None:
    """Return the field of a sample's image: of `depth.png` and `jpg`, the latter."""
    image_fields = [field for field in fields if f".{field.split('.')[-1]}" in PICTURES]
    return min(image_fields, key=lambda field: field.count("."), default=None)
