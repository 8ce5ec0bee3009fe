"""Locks on folders: one process writes, others wait or are refused (no torch here)."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from backbones.parsing import json_of
from experiments.runtime.files import refuse_links
from routing.errors import UserError

try:
    import fcntl
except ImportError:  # Windows has no `flock`
    fcntl = None  # type: ignore[assignment]


class LockedError(UserError):
    """Another live process holds the lock, or the file system has none."""


@contextlib.contextmanager
def locked(folder: Path, wait_s: float = 0.5) -> Iterator[None]:
    """Hold `folder/lock` while the block runs; the file's text names the holder.

    The kernel releases a dead process's lock, so a crash never blocks the next start. The lock
    works across hosts if the file system supports `flock` (NFSv4, Lustre mounted with flock).
    `is_locked` holds it for a moment, which must not look like a writer: hence the wait.

    Raises:
        LockedError: Another process held it for `wait_s` seconds, or the file system has no locks.
    """
    from filelock import FileLock, Timeout  # not at the top: see `command.run_command`

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "lock"
    refuse_links(folder, [path.name])
    lock = FileLock(path, fallback_to_soft=False)
    try:
        lock.acquire(timeout=wait_s, poll_interval=0.05)
    except Timeout as error:
        raise LockedError(
            f"{folder} is being written by {_holder(path)}: wait for it or stop it, then type the "
            "command again"
        ) from error
    except (OSError, NotImplementedError) as error:
        if getattr(error, "filename", None):
            raise  # the error names a file that cannot be opened
        reason = getattr(error, "strerror", None) or error
        raise LockedError(
            f"{folder} cannot be locked ({reason}), so two processes could write to it at once: "
            "put it on a file system with flock"
        ) from error
    try:
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
        with contextlib.suppress(OSError):  # on a full disk the text is missing, not the lock
            path.write_text(json.dumps(holder))
        yield
    finally:
        with contextlib.suppress(OSError):
            path.write_text("")
        lock.release()


def _holder(path: Path) -> str:
    """Return the process that a lock file names."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        holder = json_of(path.read_text())
        return f"process {holder['pid']} on {holder['host']}"
    return "another process"


def is_locked(folder: Path) -> bool:
    """Whether a process holds `folder/lock`; a shared lock needs no write permission."""
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
