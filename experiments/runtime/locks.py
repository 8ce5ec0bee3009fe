"""Exclusive locks on a path: one writer for a run folder, one launch of a sweep at a time."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from routing.errors import UserError
from routing.parsing import json_of


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
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "lock"
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
            raise  # the file itself cannot be opened, which the error says
        reason = getattr(error, "strerror", None) or error
        raise LockedError(
            f"{folder} cannot be locked ({reason}), so nothing would keep two processes apart: put "
            "paths.runs on a file system with flock"
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
    """Return whether some process holds `folder/lock`."""
    path = folder / "lock"
    if not path.is_file():
        return False
    try:
        with FileLock(path, fallback_to_soft=False).acquire(timeout=0):
            return False
    except Timeout:
        return True
    except PermissionError:  # a colleague's folder: a shared lock needs no right to write
        import fcntl

        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False


def _holder(path: Path) -> str:
    try:
        found = json_of(path.read_text())
        return f"process {found['pid']} on {found['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
