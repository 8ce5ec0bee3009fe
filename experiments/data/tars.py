"""Files inside tar archives, read by position: nothing is extracted, and no pickle is read.

Samples are grouped as in WebDataset: the key is the path up to the first dot of the file's name,
and the rest is the field (`n01440764/10026.latent.npy` is the field `latent.npy` of the sample
`n01440764/10026`). Files without a key or a field, such as `README`, belong to no sample. Hidden
files and those of operating systems (`._10026.png`, `__MACOSX/...`) are ignored.
"""

from __future__ import annotations

import contextlib
import io
import math
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from backbones.parsing import check_file, whole
from experiments.data.data_options import DataError, require
from experiments.runtime.files import is_system_file

_MOST_DIGITS = 32  # of a label


class Member(NamedTuple):
    """One file in an archive: key of its sample, field, and position of its bytes."""

    key: str
    field: str
    offset: int
    size: int


def samples_of(path: Path) -> dict[str, dict[str, Member]]:
    """Return {key: {field: member}} of an archive, with keys in its order."""
    samples: dict[str, dict[str, Member]] = {}
    for member in walk(path):
        samples.setdefault(member.key, {})[member.field] = member
    require(bool(samples), f"{path} holds no files named KEY.FIELD")
    return samples


def walk(path: Path) -> Iterator[Member]:
    """Yield the samples' files of an uncompressed tar archive as their headers are read.

    Raises:
        DataError: The archive is damaged, or a name points outside of it.
    """
    try:
        check_file(path)
        size = path.stat().st_size
        with tarfile.open(path, "r:") as archive:
            for info in archive:
                member = _member(info, path)
                if member is not None:
                    yield member
            # tarfile accepts a file that was cut off between two members.
            require(
                archive.offset + tarfile.BLOCKSIZE <= size,
                f"{path} is truncated: its end is missing; copy it again",
            )
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    except (tarfile.TarError, EOFError, ValueError, OverflowError, MemoryError) as error:
        raise DataError(
            f"{path} is truncated, compressed, or no tar archive ({error}); copy it again, "
            "or unpack a compressed one to plain .tar"
        ) from None


def _member(info: tarfile.TarInfo, path: Path) -> Member | None:
    """Return a file of an archive as a member of a sample, None if it belongs to none."""
    outside = info.name.startswith("/") or ".." in PurePosixPath(info.name).parts
    require(
        not (outside or info.issym() or info.islnk() or info.isdev()),
        f"{path}: member {info.name!r} is a link or points outside of the archive; pack plain "
        "files only",
    )
    for part in info.name.split("/"):
        if part not in ("", ".") and is_system_file(part):
            return None
    folder, _, name = info.name.rpartition("/")
    stem, _, field = name.partition(".")
    if not stem or not field or not info.isreg():
        return None
    key = f"{folder}/{stem}" if folder else stem
    return Member(key, field.lower(), info.offset_data, info.size)


def read_member(archive: BinaryIO, member: Member, most: int = -1) -> bytes:
    """Return the bytes of a file in an archive, at most so many."""
    archive.seek(member.offset)
    return archive.read(member.size if most < 0 else min(member.size, most))


def read_label(archive: BinaryIO, fields: dict[str, Member], source: str) -> int | None:
    """Return the label in a sample's field `cls`, None without one."""
    if "cls" not in fields:
        return None
    text = read_member(archive, fields["cls"], _MOST_DIGITS).decode("latin-1")
    return whole(text, f"{source}: cls holds ", DataError)


LATENT_FIELDS = ("latent.npy", "latent")  # fields that hold a sample's latent


def latent_header(
    archive: BinaryIO, fields: dict[str, Member], source: str
) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """Return type, shape and position of the values of a sample's latent, an .npy array.

    Raises:
        DataError: The sample has no latent, or one that is no plain array.
    """
    names = [name for name in LATENT_FIELDS if name in fields]
    require(
        names,
        f"{source} has no latent.npy; found {', '.join(sorted(fields))}; name its files "
        "KEY.latent.npy and KEY.cls, or, if these are images, run python "
        "experiments/prepare.py on them",
    )
    member = fields[names[0]]
    stream = io.BytesIO(read_member(archive, member, 4096))
    actual = f"starts with {stream.getvalue()[:6]!r}"
    with contextlib.suppress(Exception):  # not an array, or a damaged header
        if np.lib.format.read_magic(stream) == (1, 0):
            read_header = np.lib.format.read_array_header_1_0
        else:
            read_header = np.lib.format.read_array_header_2_0
        shape, fortran_order, dtype = read_header(stream, max_header_size=4096)
        actual = f"holds {dtype} {list(shape)} in {member.size} bytes"
        supported = dtype.kind == "f" and dtype.itemsize in (2, 4, 8) and dtype.byteorder != ">"
        complete = member.size == stream.tell() + dtype.itemsize * math.prod(shape)
        if supported and complete and not fortran_order:
            return dtype, shape, member.offset + stream.tell()
    raise DataError(
        f"{source}.{member.field} {actual}; expected a whole .npy array of float16 or float32 in C "
        "order; a pickle is never read, because it can run code: convert it once, if you trust "
        "it, with numpy.save(file, numpy.asarray(pickle.load(old))) as latent.npy"
    )
