"""One writer for a run folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from routing.errors import UserError


class LockedError(UserError):
    """Another live process is writing to the same run folder."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold `folder/lock` while the block runs.

    The kernel drops a dead process's lock by itself, so a crash never blocks the next start. It
    reaches across
    hosts where the file system carries `flock` (NFSv4, Lustre mounted with flock).

    Raises:
        LockedError: Names the process that holds it, or says that the file system has no locks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "lock"
    with path.open("a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise LockedError(
                    f"{folder} cannot be locked ({error.strerror}), so nothing would keep two "
                    "processes apart: put paths.runs on a file system with flock"
                ) from error
            handle.seek(0)
            holder = _holder(handle.read())
            raise LockedError(
                f"{folder} is being written by {holder}: wait for it or stop it, then type the "
                "command again"
            ) from error
        handle.truncate(0)
        handle.write(
            json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()})
        )
        handle.flush()
        try:
            yield
        finally:
            handle.truncate(0)
            fcntl.flock(handle, fcntl.LOCK_UN)


def _holder(text: str) -> str:
    try:
        found = json.loads(text)
        return f"process {found['pid']} on {found['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
