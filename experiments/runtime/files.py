"""Files: written whole or not at all, their checksums, the commit of the code (no torch here)."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

from routing.parsing import json_of

try:
    import fcntl
except ImportError:  # Windows: no `flock`, and a file that is open there cannot be renamed
    fcntl = None  # type: ignore[assignment]


def fsync_dir(path: Path) -> None:
    """Flush a directory entry to disk, so that a rename survives a power cut."""
    if fcntl is None:  # Windows opens no directories
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def check_replaceable(target: Path) -> None:
    """Refuse a target that is there and no file: a rename would take a device's place.

    Raises:
        OSError: See the message.
    """
    if target.exists() and not target.is_file():
        raise OSError(errno.EEXIST, "it is no file", str(target))


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path in the same folder that becomes `path` if the block succeeds.

    The temporary file keeps the suffix of `path` (libraries choose a format by it). It is flushed
    to disk before the rename and removed if the block raises, so `path` is never half written.
    What a killed writer of the same `path` left behind is removed first.

    Raises:
        OSError: The disk is full or refuses, also where safetensors says so in a type of its own.
    """
    target = Path(path)
    check_replaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Open, and locked, as long as this process lives: that tells a killed writer's from a slow one.
    handle, temporary = _temporary(target)
    mode = stat.S_IMODE(temporary.stat().st_mode) if handle is not None else None
    try:
        yield temporary
        if mode is not None:  # safetensors puts a private file of its own in the place of this one
            temporary.chmod(mode)
        with temporary.open("r+b") as written:  # Windows flushes what may be written
            os.fsync(written.fileno())
        os.replace(temporary, target)
        fsync_dir(target.parent)
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None or type(error).__name__ != "SafetensorError":
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(target)) from error
    finally:
        temporary.unlink(missing_ok=True)
        if handle is not None:
            os.close(handle)


def atomic_write(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write `content` (text as UTF-8) so that a reader sees the old file or the whole new one."""
    data = content.encode() if isinstance(content, str) else content
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def _temporary(target: Path) -> tuple[int | None, Path]:
    prefix, suffix = f".{target.stem}-", f".tmp{target.suffix}"
    if fcntl is None:
        return None, target.with_name(prefix + secrets.token_hex(4) + suffix)
    for entry in os.scandir(target.parent):
        middle = entry.name.removeprefix(prefix).removesuffix(suffix)
        if entry.name == prefix + middle + suffix and re.fullmatch(r"[a-z0-9_]{8}", middle):
            with contextlib.suppress(OSError):
                handle = os.open(entry, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(entry)
                finally:
                    os.close(handle)
    while True:
        path = target.with_name(prefix + secrets.token_hex(4) + suffix)
        # Not private as tempfile's are: the umask decides, as for any other file.
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        with contextlib.suppress(OSError):  # a file system without locks: nothing is tidied there
            fcntl.flock(handle, fcntl.LOCK_EX)
        if path.exists():  # nobody took it for a dead writer's between the two calls
            return handle, path
        os.close(handle)


def default_cache() -> Path:
    """Return the user's cache folder: `$XDG_CACHE_HOME/tread-suite` or `~/.cache/tread-suite`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tread-suite"


def sha256(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file as hexadecimal digits, read in pieces of 1 MiB."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as handle:
        while piece := handle.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def code_commit(root: Path) -> str | None:
    """Return the commit of the code at `root`, `+` if it has changes; None outside a repository.

    A sweep's copy of the code has no repository: its `snapshot.json` says where it was taken.
    """
    with contextlib.suppress(OSError, ValueError):
        return json_of((root / "snapshot.json").read_bytes())["commit"]

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=30
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None
