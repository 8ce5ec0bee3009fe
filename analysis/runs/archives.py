"""Archives of the records of runs, `results/*.tar.gz`: unpacked once, within limits."""

import gzip
import hashlib
import io
import tarfile
import tempfile
import zlib
from pathlib import Path
from typing import Any

from analysis.errors import AnalysisError

# Where records of results/ are unpacked: hidden, so that a command on all of `runs` skips them.
PUBLISHED = Path("runs", ".published")
# Of an archive of records; the published ones have 4 MiB in 421 files.
MAX_UNPACKED, MAX_FILES = 256 * 2**20, 20_000


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack records into a folder of their content's name, once, and return it.

    `AnalysisError` if it is no archive with a folder `runs`, or unpacks to more than the limits.
    """
    if not archive.is_file():
        raise AnalysisError(f"there is no archive {archive}; pass another, or a folder of runs")
    with archive.open("rb") as stream:
        target = folder / hashlib.file_digest(stream, "sha256").hexdigest()[:12]
    if not target.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        # Moved at the end, so that an existing folder is always complete.
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            try:
                _extract(_decompressed(archive), Path(temporary), archive)
                runs = Path(temporary) / "runs"
                if not runs.is_dir():
                    raise AnalysisError(
                        f"{archive} holds no records of runs: no folder runs/ in it"
                    )
                runs.rename(target)
            except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
                if not target.is_dir():  # else another process was first
                    raise AnalysisError(f"{archive} holds no records of runs: {error}") from None
    return target


def is_archive(path: Path) -> bool:
    """Whether a path names an archive of records rather than a folder of runs."""
    return path.name.endswith(".tar.gz")


def unpacked(source: Path, folder: Path = PUBLISHED) -> Path:
    """Return a folder of runs: `source` itself, or where it was unpacked if it is an archive."""
    return unpack(source, folder) if is_archive(source) else source


def _decompressed(archive: Path) -> io.BytesIO:
    """Return the tar inside an archive; `AnalysisError` beyond `MAX_UNPACKED` bytes.

    All of it is decompressed first, since tarfile takes a damaged header for the end and checks no
    checksum; piece by piece, so that a small file cannot ask for more memory than the limit.
    """
    content = io.BytesIO()
    with gzip.open(archive) as packed:
        for chunk in iter(lambda: packed.read(2**20), b""):
            if content.tell() + len(chunk) > MAX_UNPACKED:
                raise _too_large(archive)
            content.write(chunk)
    content.seek(0)
    return content


def _extract(content: io.BytesIO, folder: Path, archive: Path) -> None:
    """Write the files of a tar below a folder; `AnalysisError` where they are too large or many."""
    files, total = [], 0
    with tarfile.open(fileobj=content) as packed:
        for count, member in enumerate(packed, 1):
            # A sparse file is larger than its part of the tar.
            total += member.size
            if total > MAX_UNPACKED or count > MAX_FILES:
                raise _too_large(archive)
            # Pythons before 3.11.4 have no filter: what it refuses is left out there.
            inside = ".." not in Path(member.name).parts and member.name[:1] != "/"
            if member.isfile() and inside:
                files.append(member)
        extra: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        packed.extractall(folder, files, **extra)


def _too_large(archive: Path) -> AnalysisError:
    return AnalysisError(
        f"{archive} unpacks to more than {MAX_UNPACKED // 2**20} MiB or {MAX_FILES} files, which "
        "records of runs never do; unpack it yourself if you trust it, and give its folder"
    )
