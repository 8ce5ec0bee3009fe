"""Files written whole or not at all, checksums, locks on folders, the code's commit (no torch)."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import re
import secrets
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from experiments.runtime.parsing import json_of
from routing.errors import UserError

try:
    import fcntl
except ImportError:  # Windows: no `flock`, and a file that is open there cannot be renamed
    fcntl = None  # type: ignore[assignment]

# A temporary file that nobody has written to for so long is a killed writer's.
ABANDONED_S = 86400


# Folders that macOS, a Synology disk, Windows and Linux leave beside a user's own.
_SYSTEM_FOLDERS = {
    "__MACOSX", "@eaDir", "#recycle", "$RECYCLE.BIN", "System Volume Information", "lost+found",
}  # fmt: skip


def is_system_file(name: str) -> bool:
    """Return whether a file or folder is hidden or the system's, as `._1.png` or `@eaDir`."""
    return name.startswith(".") or name in _SYSTEM_FOLDERS


def visible_files(folder: Path, pattern: str) -> list[Path]:
    """Return what matches a pattern in a folder, sorted, without the system's (`._0.tar`)."""
    return sorted(path for path in folder.glob(pattern) if not is_system_file(path.name))


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
    """Raise `OSError` for a target that is there and no file, or in a folder that takes none."""
    if target.exists() and not target.is_file():  # a rename would replace a device
        raise OSError(errno.EEXIST, "it is no file", str(target))
    above = next(folder for folder in target.absolute().parents if folder.exists())
    code = errno.EACCES if above.is_dir() else errno.ENOTDIR
    if code == errno.ENOTDIR or not os.access(above, os.W_OK):
        raise OSError(code, os.strerror(code), str(above))


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path in the same folder that becomes `path` if the block succeeds.

    The temporary file keeps the suffix of `path` (libraries choose a format by it). It is flushed
    to disk before the rename and removed if the block raises, so `path` is never half written.
    What a killed writer of the same `path` left behind is removed a day later.

    Raises:
        OSError: The disk is full or refuses, also where safetensors says so in a type of its own.
    """
    target = Path(path)
    check_replaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    names = f".{target.stem}-", f".tmp{target.suffix}"
    for old in target.parent.glob(f"{glob.escape(names[0])}????????{names[1]}"):
        with contextlib.suppress(OSError):
            if old.stat().st_mtime < time.time() - ABANDONED_S:
                old.unlink()
    temporary = target.with_name(secrets.token_hex(4).join(names))
    try:
        # Not private as tempfile's are: the umask decides, as for any other file.
        temporary.touch()
        mode = stat.S_IMODE(temporary.stat().st_mode)
        yield temporary
        # safetensors puts a private file of its own in the place of this one.
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


def atomic_write(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write `content` (text as UTF-8) so that a reader sees the old file or the whole new one."""
    data = content.encode() if isinstance(content, str) else content
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def default_cache() -> Path:
    """Return the user's cache folder: `$XDG_CACHE_HOME/tread-suite` or `~/.cache/tread-suite`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tread-suite"


def sha256(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file as hexadecimal digits, read piece by piece."""
    with Path(path).open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def code_commit(root: Path) -> str | None:
    """Return the commit of the code at `root`, `+` if it has changes; None outside a repository.

    A sweep's copy of the code has no repository: its `snapshot.json` says where it was taken.
    """
    with contextlib.suppress(OSError, ValueError):
        return json_of((root / "snapshot.json").read_bytes())["commit"]
    describe = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            [*describe, "--dirty=+"], capture_output=True, text=True, check=True, timeout=30
        ).stdout.strip()
    return None


# --- locks ----------------------------------------------------------------------------------------


class LockedError(UserError):
    """Another live process holds the lock, or the file system has none."""


@contextlib.contextmanager
def locked(folder: Path, wait_s: float = 0.5) -> Iterator[None]:
    """Hold `folder/lock` while the block runs; the file's text names the holder.

    The kernel drops a dead process's lock by itself, so a crash never blocks the next start. It
    reaches across hosts where the file system carries `flock` (NFSv4, Lustre mounted with flock).
    `is_locked` holds it for a moment, which no writer may take for another one: hence the wait.

    Raises:
        LockedError: Another process held it for `wait_s` seconds, or the file system has no locks.
    """
    from filelock import FileLock, Timeout  # not at the top: see `command.run_command`

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "lock"
    lock = FileLock(path, fallback_to_soft=False)
    try:
        lock.acquire(timeout=wait_s, poll_interval=0.05)
    except Timeout as error:
        holder = "another process"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = json_of(path.read_text())
            holder = f"process {found['pid']} on {found['host']}"
        raise LockedError(
            f"{folder} is being written by {holder}: wait for it or stop it, then type the "
            "command again"
        ) from error
    except (OSError, NotImplementedError) as error:
        if getattr(error, "filename", None):
            raise  # the file itself cannot be opened, which the error says
        reason = getattr(error, "strerror", None) or error
        raise LockedError(
            f"{folder} cannot be locked ({reason}), so nothing would keep two processes apart: put "
            "it on a file system with flock"
        ) from error
    try:
        about = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
        with contextlib.suppress(OSError):  # on a full disk the text is missing, not the lock
            path.write_text(json.dumps(about))
        yield
    finally:
        with contextlib.suppress(OSError):
            path.write_text("")
        lock.release()


def is_locked(folder: Path) -> bool:
    """Return whether some process holds `folder/lock`; a shared lock needs no right to write."""
    path = folder / "lock"
    if not path.is_file():
        return False
    try:
        if fcntl is None:
            with locked(folder, wait_s=0):
                return False
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except (BlockingIOError, LockedError):
        return True
