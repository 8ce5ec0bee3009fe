"""Files inside tar archives, by position: nothing is ever extracted.

Samples are grouped as WebDataset groups them: the key is the path up to the first dot of the file's
name, the rest is the field (`n01440764/10026.latent.npy` is the field `latent.npy` of the sample
`n01440764/10026`). A file that lacks one of them, as `README` or `._10026.png`, belongs to none.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from experiments.data.data_options import DataError
from routing.parsing import whole


@dataclass(frozen=True)
class Member:
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
                links = info.issym() or info.islnk()
                escapes = info.name.startswith("/") or ".." in PurePosixPath(info.name).parts
                if links or escapes or info.isdev():
                    kind = "is a link" if links else "points outside of the archive"
                    raise DataError(f"{path}: member {info.name!r} {kind}; pack plain files only")
                if not info.isreg():
                    continue
                if info.offset_data + info.size > size:
                    raise DataError(f"{path} is truncated inside {info.name}; copy it again")
                folder, _, name = info.name.rpartition("/")
                stem, _, field = name.partition(".")
                key = f"{folder}/{stem}" if folder else stem
                if stem and field:
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


def read_label(content: bytes, where: str) -> int:
    """Return the number that a `cls` member holds in digits."""
    try:
        return whole(content.decode("ascii"))
    except ValueError:
        raise DataError(
            f"{where}: cls holds {content[:16]!r}; expected a number in digits"
        ) from None
