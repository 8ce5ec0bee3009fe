"""Sources of images to prepare: folders and WebDataset tars.

Every source counts its images first and then returns any range of them as raw bytes, so that a
shard is a function of its number and an interrupted preparation continues with the next one.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from backbones.parsing import bytes_of, json_of
from experiments.data.class_folders import LABEL_FILE, class_of_each, edm_labels
from experiments.data.data_options import PICTURES, DataError, require
from experiments.data.raw_images import RawImage
from experiments.data.tars import Member, read_label, read_member, walk
from experiments.runtime.digest import PICTURE_BYTES, hash_of, picture_ends


class LeftOut:
    """What lies beside the images and is not read: a count and an example for each kind."""

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[int, str]] = {}

    def add(self, kind: str, example: str, count: int = 1) -> None:
        """Count things of a kind, such as `.txt files`."""
        before, first = self._kinds.get(kind, (0, example))
        self._kinds[kind] = (before + count, first)

    def __str__(self) -> str:
        parts = []
        for kind, (count, example) in self._kinds.items():
            more = ", ..." if count > 1 else ""
            parts.append(f"{kind}: {count:,} ({example}{more})")
        return "; ".join(parts)


class ImageSource:
    """A numbered set of images."""

    count: int
    classes: tuple[str, ...] = ()  # class names if the source has them
    labelled = False  # whether every image has a label
    captioned = False  # whether every image has a caption
    fingerprint: str  # changes with the list of images
    left_out: LeftOut  # what is not read
    label_file: Path | None = None  # EDM's, where it gives the labels

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
        self._root, self.left_out = root, LeftOut()
        self.count = len(images)
        self._names = [path.relative_to(root).as_posix() for path in images]
        self.labels: list[int | None] = [None] * self.count
        self._captions: list[tuple[str, ...]] = [()] * self.count
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
        images_of: dict[str, str] = {}  # by the name of their captions: the path, or the file name
        for index, name in enumerate(self._names):
            key = name if name in captions_by_name else name.rsplit("/", 1)[-1]
            captions = captions_by_name.get(key)
            if captions:
                self._captions[index] = captions
                first = images_of.setdefault(key, name)
                require(
                    first == name,
                    f"{path} has captions of {key}, and images of this name are {first} and "
                    f"{name}; name them by their paths",
                )
            else:
                missing.append(name)
        for name in captions_by_name:
            if name not in images_of:
                self.left_out.add("captions of other files", name)
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


# Fields of a sample's label and caption.
_TEXTS = frozenset(("cls", "txt"))
# Number of the tar, key, the image, and all fields of the sample.
Sample: TypeAlias = tuple[int, str, Member, dict[str, Member]]


class TarSource(ImageSource):
    """WebDataset tars: images, with a label `cls` and a caption `txt` if there are any.

    Names that contain dots, such as `IMG_0.1.jpg` with `IMG_0.1.cls`, end at their last one where
    the first would give a sample nothing but images and labels of other names.
    """

    def __init__(self, tars: list[Path]) -> None:
        self._tars, self.left_out = tars, LeftOut()
        self._samples: list[Sample] = []
        unlabelled = []
        self.captioned = True
        for number, path in enumerate(tars):
            for key, image_field, fields in self._image_samples(path):
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
        if not self.labelled:
            folders = {key.rpartition("/")[0] for _, key, _, _ in self._samples} - {""}
            for folder in sorted(folders):
                self.left_out.add("folders, as the labels of a tar are KEY.cls", folder)
        self.fingerprint = digest_of([[path.name, path.stat().st_size] for path in tars])

    def _image_samples(self, path: Path) -> Iterator[tuple[str, str, dict[str, Member]]]:
        """Yield key, field of the image and fields of each sample with an image."""
        samples: dict[str, dict[str, Member]] = {}
        for member in walk(path):
            fields = samples.setdefault(member.key, {})
            if member.field in fields:  # the last one counts, as for tar itself
                self._leave_out("earlier files of the same name", path, member)
            fields[member.field] = member
        for whole_key, all_fields in samples.items():
            for key, fields in _split_at_last_dots(whole_key, all_fields).items():
                # Of `depth.png` and `jpg` the latter.
                images = sorted(filter(_is_image, fields), key=lambda field: field.count("."))
                if images:
                    yield key, images[0], fields
                for field, member in fields.items():
                    if _is_image(field) and field != images[0]:
                        self._leave_out("further images of a sample", path, member)
                    elif field not in (*_TEXTS, *images[:1]) or not images:
                        alone = " without an image" if field in _TEXTS else ""
                        self._leave_out(f".{field} files{alone}", path, member)

    def _leave_out(self, kind: str, path: Path, member: Member) -> None:
        self.left_out.add(kind, f"{path.name}: {member.key}.{member.field}")

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
                        for field in sorted(_TEXTS & fields.keys()):
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


def _is_image(field: str) -> bool:
    return f".{field.rpartition('.')[2]}" in PICTURES


def _split_at_last_dots(key: str, fields: dict[str, Member]) -> dict[str, dict[str, Member]]:
    """Return the samples that share a key, by keys of their own.

    They are several if no field is what WebDataset names an image, label or caption: the names are
    `IMG_0.1.jpg`, `IMG_0.2.jpg`, and contain dots.
    """
    usual = {*_TEXTS, *(suffix.removeprefix(".") for suffix in PICTURES)}
    if usual & fields.keys() or not any(map(_is_image, fields)):
        return {key: fields}
    samples: dict[str, dict[str, Member]] = {}
    for name, member in fields.items():
        stem, dot, field = name.rpartition(".")
        samples.setdefault(f"{key}.{stem}" if dot else key, {})[field] = member
    return samples
