"""Digests of files: what they hold, wherever they are and however their path was typed (no torch).

A run's name holds names and sizes, as a dry run must not read all data. What a run trains on is
compared in more detail when it resumes: its checkpoints hold `content_digest`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from backbones.parsing import check_file
from experiments.runtime.files import atomic_write

_BLOCK = 1 << 16
_BLOCKS = 64
PICTURE_BYTES = 4096
_PART = 500  # files that a thread reads at a time


def sampled(path: str | os.PathLike[str]) -> bytes:
    """Return a digest of a large file: its size and 64 blocks of 64 kB, spread evenly over it.

    The first block holds the header of a safetensors file, the last one ends with the file.

    Raises:
        OSError: The file is missing, cannot be read, or is a pipe.
    """
    check_file(Path(path))
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(str(size).encode())
        if size <= _BLOCKS * _BLOCK:
            digest.update(file.read())
        else:
            for number in range(_BLOCKS):
                file.seek(number * (size - _BLOCK) // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK))
    return digest.digest()


def picture_ends(path: str | os.PathLike[str]) -> bytes:
    """Return size, the first and the last 4 kB of a picture; nothing for an unreadable file."""
    try:
        # Not `Path.open`, which takes three times as long. Opening a pipe must not wait; Windows
        # has another flag, for bytes.
        flags = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        file = os.open(path, os.O_RDONLY | flags)
    except OSError:
        return b""
    try:
        size = os.fstat(file).st_size
        content = os.read(file, PICTURE_BYTES)
        if size > PICTURE_BYTES:
            os.lseek(file, max(PICTURE_BYTES, size - PICTURE_BYTES), os.SEEK_SET)
            content += os.read(file, PICTURE_BYTES)
        return b"%d\n%b" % (size, content)
    except OSError:
        return b""
    finally:
        os.close(file)


def hash_of(parts: Iterable[bytes]) -> str:
    """Return a checksum of a sequence of byte strings."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(b"%d\n" % len(part))
        digest.update(part)
    return digest.hexdigest()[:16]


class File(NamedTuple):
    """A file whose content counts."""

    name: str  # within its data set
    path: str
    read: Callable[[str], bytes]  # `sampled` or `picture_ends`


def content_digest(files: Sequence[File], cache: Path) -> str:
    """Return a digest of the names and contents of files.

    It is kept in the folder `cache` for as long as no file has another size, time or inode.

    Raises:
        OSError: A file cannot be read.
    """
    kept = cache / "digests" / _state_of(files)
    with contextlib.suppress(OSError):
        if len(text := kept.read_text()) == 64:
            return text
    parts = [files[start : start + _PART] for start in range(0, len(files), _PART)]
    digest = hashlib.sha256()
    with ThreadPoolExecutor(8) as pool:
        for part in pool.map(_digest_of, parts):
            digest.update(part)
    with contextlib.suppress(OSError):  # a cache that is full or cannot be written
        atomic_write(kept, digest.hexdigest())
    return digest.hexdigest()


def _state_of(files: Sequence[File]) -> str:
    """Return a digest of real path, size, times and inode of files; nothing is read."""
    state = hashlib.sha256()
    folders: dict[str, str] = {}  # real path of each
    for file in files:
        folder = os.path.dirname(file.path)
        if folder not in folders:
            folders[folder] = os.path.realpath(folder)
        values: tuple[int, ...] = ()
        with contextlib.suppress(OSError):  # a broken link
            stat = os.stat(file.path)
            values = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
        state.update(f"{file.name}\0{folders[folder]}\0{values}\n".encode(errors="replace"))
    return state.hexdigest()[:32]


def _digest_of(files: Sequence[File]) -> bytes:
    digest = hashlib.sha256()
    for file in files:
        content = file.read(file.path)
        digest.update(f"{file.name}\0{len(content)}\0".encode(errors="replace"))
        digest.update(content)
    return digest.digest()
