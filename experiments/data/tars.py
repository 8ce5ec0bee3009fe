"""Files inside tar archives, by position: nothing is ever extracted, and no pickle is read.

Samples are grouped as WebDataset groups them: the key is the path up to the first dot of the file's
name, the rest is the field (`n01440764/10026.latent.npy` is the field `latent.npy` of the sample
`n01440764/10026`). A file that lacks one of them, as `README`, belongs to none; hidden files and
what systems leave (`._10026.png`, `__MACOSX/...`) are ignored.
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

from experiments.data.data_options import DataError
from experiments.runtime.files import is_system_file


class Member(NamedTuple):
    """One file in an archive: its sample's key, its field, and where its bytes are."""

    key: str
    field: str
    offset: int
    size: int


def samples_of(path: Path) -> dict[str, dict[str, Member]]:
    """Return {key: {field: member}} of an archive, keys in its order."""
    samples: dict[str, dict[str, Member]] = {}
    for member in walk(path):
        samples.setdefault(member.key, {})[member.field] = member
    if not samples:
        raise DataError(f"{path} holds no files named KEY.FIELD")
    return samples


def walk(path: Path) -> Iterator[Member]:
    """Yield the samples' files in an uncompressed tar archive as their headers are read.

    Raises:
        DataError: The archive is damaged, or a name in it leaves it.
    """
    try:
        size = path.stat().st_size
        with tarfile.open(path, "r:") as archive:
            for info in archive:
                outside = info.name.startswith("/") or ".." in PurePosixPath(info.name).parts
                if outside or info.issym() or info.islnk() or info.isdev():
                    said = (
                        f"{path}: member {info.name!r} is a link or points outside of the archive"
                    )
                    raise DataError(f"{said}; pack plain files only")
                # Of a folder that macOS or an editor left, nothing is a sample.
                parts = [part for part in info.name.split("/") if part not in ("", ".")]
                if any(map(is_system_file, parts)):
                    continue
                folder, _, name = info.name.rpartition("/")
                stem, _, field = name.partition(".")
                key = f"{folder}/{stem}" if folder else stem
                if stem and field and info.isreg():
                    yield Member(key, field.lower(), info.offset_data, info.size)
            # tarfile takes a file that was cut off between two members for a whole one.
            if archive.offset + tarfile.BLOCKSIZE > size:
                raise DataError(f"{path} is truncated: its end is missing; copy it again")
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    except (tarfile.TarError, EOFError, ValueError, OverflowError, MemoryError) as error:
        raise DataError(
            f"{path} is truncated, compressed, or no tar archive ({error}); copy it again, "
            "or unpack a compressed one to plain .tar"
        ) from None


LATENT = ("latent.npy", "latent")  # fields that hold a sample's latent


def latent_in(
    archive: BinaryIO, fields: dict[str, Member], where: str
) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """Return type and shape of a sample's latent, an .npy array, and where its numbers begin.

    Raises:
        DataError: There is none, or one that is no plain array.
    """
    member = next((fields[name] for name in LATENT if name in fields), None)
    if member is None:
        raise DataError(
            f"{where} has no latent.npy; found {', '.join(sorted(fields))}; name its files "
            "KEY.latent.npy and KEY.cls, or, if these are pictures, run python "
            "experiments/prepare.py on them"
        )
    archive.seek(member.offset)
    stream = io.BytesIO(archive.read(min(4096, member.size)))
    found = f"starts with {stream.getvalue()[:6]!r}"
    with contextlib.suppress(Exception):  # no array, or a damaged header
        first = np.lib.format.read_magic(stream) == (1, 0)
        formats = np.lib.format
        read = formats.read_array_header_1_0 if first else formats.read_array_header_2_0
        shape, fortran, dtype = read(stream, max_header_size=4096)
        found = f"holds {dtype} {list(shape)} in {member.size} bytes"
        good = dtype.kind == "f" and dtype.itemsize in (2, 4, 8) and dtype.byteorder != ">"
        complete = member.size == stream.tell() + dtype.itemsize * math.prod(shape)
        if good and complete and not fortran:
            return dtype, shape, member.offset + stream.tell()
    raise DataError(
        f"{where}.{member.field} {found}; expected a whole .npy array of float16 or float32 in C "
        "order; a pickle is never read, because it can run code: convert it once, if you trust "
        "it, with numpy.save(file, numpy.asarray(pickle.load(old))) as latent.npy"
    )
